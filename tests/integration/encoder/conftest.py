"""A real store for each test."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stores import StoreProcess


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    shared_memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    run_dir = Path(tempfile.mkdtemp(prefix="triptych-test-", dir=shared_memory))
    daemon = StoreProcess(run_dir)
    daemon.start()
    yield daemon
    daemon.close()
    shutil.rmtree(run_dir)
