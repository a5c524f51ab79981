"""Real CUDA. Needs a GPU, torch, cuda-bindings and what the store imports; neither vLLM nor Redis.

`python -m pytest tests/gpu`, from a checkout: nothing of Triptych has to be installed.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [str(ROOT / "libs" / "common" / "src"), str(ROOT / "services" / "cache_store" / "src")]
SHARED_MEMORY = Path("/dev/shm")

sys.path[:0] = [path for path in SOURCES if path not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join([*SOURCES, os.environ.get("PYTHONPATH", "")])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_not() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None or not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no NVIDIA GPU"
    from triptych_common.region.cuda.driver import CudaError, load_driver

    try:
        load_driver()
    except CudaError as error:
        return str(error)
    return None


@pytest.fixture
def run_dir() -> Iterator[Path]:
    directory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    path = Path(tempfile.mkdtemp(prefix="triptych-gpu-", dir=directory))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def strips() -> ModuleType:
    from support.system import load_strips  # needs vLLM's environment: not for the transports alone

    return load_strips()
