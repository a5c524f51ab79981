"""The host's question for the store's slab goes through vLLM's EngineCore to the worker, and back."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.real.system import MODEL
from triptych_cache_store.testing import StoreProcess
from triptych_cli.settings import caller_environment
from triptych_cli.system.engines import CPU_ENGINE_ENV, ENGINE_ENV

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "real" / "ask_worker.py"

pytestmark = pytest.mark.engine


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    run_dir = Path(tempfile.mkdtemp(prefix="triptych-test-", dir="/dev/shm"))
    store = StoreProcess(run_dir)
    store.start()
    yield store
    store.close()
    shutil.rmtree(run_dir)


def test_a_worker_on_the_cpu_reports_that_it_has_no_gpu(store: StoreProcess, tmp_path: Path) -> None:
    env = {**caller_environment(), **ENGINE_ENV, **CPU_ENGINE_ENV, "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(store.socket), str(MODEL)],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    answer = json.loads(ended.stdout.splitlines()[-1])
    assert answer == {
        "device": None,
        "generation": store.connect("looker/x").welcome.generation,
        "failure": "this worker has no GPU",
    }
