"""The host's question for the store's slab goes through vLLM's EngineCore to the worker, and back."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.real.system import MODEL, START_TIMEOUT_S
from tests.support.real.warm import client as warm
from tests.support.real.warm.preload import ENVIRONMENT
from tests.support.stores import StoreProcess

pytestmark = pytest.mark.engine


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    run_dir = Path(tempfile.mkdtemp(prefix="triptych-test-", dir="/dev/shm"))
    store = StoreProcess(run_dir)
    store.start()
    yield store
    store.close()
    shutil.rmtree(run_dir)


def test_a_worker_on_the_cpu_reports_that_it_has_no_gpu(store: StoreProcess) -> None:
    ended = warm.run(
        [sys.executable, "-m", "tests.support.real.ask_worker", str(store.socket), str(MODEL)],
        environment={**ENVIRONMENT, **os.environ}, timeout_s=START_TIMEOUT_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    answer = json.loads(ended.stdout.splitlines()[-1])
    assert answer == {
        "device": None,
        "generation": store.connect("looker/x").welcome.generation,
        "failure": "this worker has no GPU",
    }
