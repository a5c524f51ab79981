"""A folder on a tmpfs, and real cache_store daemons in it."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.stores import StoreProcess

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Its path is short, as those of sockets have to be."""
    directory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    path = Path(tempfile.mkdtemp(prefix="triptych-test-", dir=directory))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make_daemon(run_dir: Path) -> Iterator[Callable[..., StoreProcess]]:
    daemons: list[StoreProcess] = []

    def make(*options: str, **sizes: int) -> StoreProcess:
        daemon = StoreProcess(run_dir, *options, **sizes)
        daemons.append(daemon)
        daemon.start()
        return daemon

    yield make
    for daemon in daemons:
        daemon.close()


@pytest.fixture
def daemon(make_daemon: Callable[..., StoreProcess]) -> StoreProcess:
    return make_daemon()


@pytest.fixture
def store(make_daemon: Callable[..., StoreProcess]) -> StoreProcess:
    """A daemon, as tests of its clients call it."""
    return make_daemon()
