"""Real engines, started once for all tests that can share them."""

import hashlib
import os
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.support.real.engine_options import TOOLS
from tests.support.real.system import EXACT, Server, System, load_strips, running_monolith, running_system

TENANTS = {"none": None, "alice": "red", "anna": "red", "bob": "blue"}
"""By API key; `none` is what a `Server` sends if a test names no other."""


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """vLLM sets variables of this process when a test makes a configuration in it, `LD_PRELOAD` among them.

    Engines that were started with these could not be forked (`tests.support.real.warm`).
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def system() -> Iterator[System]:
    with running_system(
        f"--encoder-args={' '.join(EXACT)}",
        f"--prefill-decode-args={' '.join((*EXACT, *TOOLS))}",
        TRIPTYCH_OVERLAP_MIN_TOKENS="1",  # the strips are small, and all prompts shall begin in part
        VLLM_ENABLE_RESPONSES_API_STORE="1",
        TRIPTYCH_UI="true",
        is_forked=True,
    ) as running:
        yield running


@pytest.fixture(scope="session")
def with_tower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Its prefill_decode encodes where no encoder does, and its callers have tenants: see `TENANTS`."""
    keys = tmp_path_factory.mktemp("tenants") / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text("".join(map(_key, TENANTS.items())))
    options = " ".join(EXACT)
    with running_system(
        f"--encoder-args={options}",
        f"--prefill-decode-args={options}",
        TRIPTYCH_API_KEYS_FILE=str(keys),
        TRIPTYCH_LOCAL_ENCODE="fallback",
        TRIPTYCH_LOCAL_ENCODE_AFTER_S="2",
        TRIPTYCH_ENCODER_GRACE_S="1",
        is_forked=True,
    ) as running:
        yield running


def _key(named: tuple[str, str | None]) -> str:
    key, tenant = named
    digest = hashlib.sha256(key.encode()).hexdigest()
    entry = f'[[keys]]\nname = "{key}"\nsha256 = "{digest}"\n'
    return entry if tenant is None else f'{entry}tenant = "{tenant}"\n'


@pytest.fixture(scope="session")
def monolith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_monolith(
        tmp_path_factory.mktemp("monolith"), "--trust-request-mm-kwargs", *TOOLS, is_forked=True
    ) as running:
        yield running


@pytest.fixture(scope="session")
def strips() -> ModuleType:
    return load_strips()
