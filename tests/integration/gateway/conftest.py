"""A real gateway on a real Redis, between a fake encoder and a fake prefill_decode."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import certifi
import pytest

from tests.support.gateway.samples import KEYS
from tests.support.gateway.system import System, opened_system


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have processes and clients read one authority: each gateway would read all, 15 ms of CPU."""
    authorities = tmp_path_factory.mktemp("authorities") / "one.pem"
    end = "-----END CERTIFICATE-----\n"
    authorities.write_text(Path(certifi.where()).read_text().partition(end)[0] + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(authorities))
        yield


@pytest.fixture
async def system(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[System]:
    """Parametrise indirectly with a dict of settings to change."""
    async with opened_system(redis_url, tmp_path, **getattr(request, "param", {})) as opened:
        yield opened


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """Two tenants with three keys, and a key without a tenant."""
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path
