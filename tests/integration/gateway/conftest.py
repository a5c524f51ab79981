"""A real gateway on a real Redis, between a fake encoder and a fake prefill_decode."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.gateway.key_samples import KEYS
from tests.support.gateway.system import System, opened_system


@pytest.fixture(scope="session", autouse=True)
def _no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trust no authority but those that a test names: each gateway would read the system's, 15 ms of CPU."""
    none = tmp_path_factory.mktemp("authorities") / "none.pem"
    none.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(none))
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
