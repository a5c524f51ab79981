"""Real engines, started once for all tests that can share them."""

from collections.abc import Iterator
from types import ModuleType

import pytest
from support.system import EXACT, Server, System, load_strips, running_monolith, running_system


@pytest.fixture(scope="session")
def system() -> Iterator[System]:
    options = " ".join(EXACT)
    with running_system(f"--encoder-args={options}", f"--prefill-decode-args={options}") as running:
        yield running


@pytest.fixture(scope="session")
def monolith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_monolith(tmp_path_factory.mktemp("monolith"), "--trust-request-mm-kwargs") as running:
        yield running


@pytest.fixture(scope="session")
def strips() -> ModuleType:
    return load_strips()
