"""Real engines, started once for all tests that can share them."""

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from support.system import EXACT, ROOT, Server, System, running_monolith, running_system


@pytest.fixture(scope="session")
def system() -> Iterator[System]:
    options = " ".join(EXACT)
    with running_system(f"--encoder-args={options}", f"--prefill-decode-args={options}") as running:
        yield running


@pytest.fixture(scope="session")
def monolith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_monolith(tmp_path_factory.mktemp("monolith")) as running:
        yield running


@pytest.fixture(scope="session")
def strips() -> ModuleType:
    """The model's own generator of held-out strips, loaded by its path."""
    spec = importlib.util.spec_from_file_location("strips", ROOT / "models" / "digits-vl" / "strips.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["strips"] = module
    spec.loader.exec_module(module)
    return module
