"""Real CUDA. From a checkout, on a machine with a CUDA build of torch; nothing of Triptych is installed:

    python -m pip install -r tests/gpu/requirements.txt && python -m pytest tests/gpu

Without a GPU everything is skipped. With one, whatever is missing is a failure, but for the whole path,
which needs vLLM as well.
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
SOURCES = [
    str(ROOT / part)
    for part in ("libs/common/src", "libs/vllm_connector/src", "services/cache_store/src", "benchmarks")
]
SHARED_MEMORY = Path(os.environ.get("TRIPTYCH_TEST_SHARED_MEMORY", "/dev/shm"))  # the region lies there

sys.path[:0] = [path for path in SOURCES if path not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*SOURCES, os.environ.get("PYTHONPATH")]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    directory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    path = Path(tempfile.mkdtemp(prefix="triptych-gpu-", dir=directory))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def strips() -> ModuleType:
    from tests.support.real.system import (
        load_strips,  # what vLLM's environment has: not for the transports alone
    )

    return load_strips()
