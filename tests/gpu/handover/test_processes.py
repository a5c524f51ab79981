"""Threads, forks and MPS around a worker's GPU."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda.stub.handles import RoleError
from tests.support.cuda.stub.machines import Machine, ProcessMachine
from tests.support.cuda.stub.system import REGION, SLAB

FORKED = """
import multiprocessing
import os

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as vLLM has it
import torch

def child():
    print(torch.zeros(1, device="cuda").device, flush=True)

assert torch.cuda.is_available()
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
raise SystemExit(process.exitcode)
"""


def test_roles_are_processes_and_need_no_gpu(run_dir: Path) -> None:
    """Store, both workers and the calls between them, as on a GPU; the slab alone is missing."""
    with contextlib.closing(ProcessMachine(run_dir, "cpu")) as machine:
        system = machine.start(slab_bytes=0)
        for rows in (1, 128):
            system.pass_on(REGION, rows)
        assert len(system.probe_failures()) == 2, "neither has a GPU"
        system.wait_unpinned()
        system.encoder.kill()
        with pytest.raises(RoleError, match="has ended"):
            system.encoder.call("probe")


def test_a_thread_that_waits_for_the_gpu_stops_no_other(
    gpu_machine: Machine, figures: dict[str, Any]
) -> None:
    system = gpu_machine.start()
    order = system.put(SLAB, 4096)
    system.step(load=system.pin(order.mm_hash))
    system.prefill_decode.call("collect")
    stop_ms = system.prefill_decode.call("longest_stop", item=order.mm_hash, busy_ms=500.0)
    figures["longest stop ms"] = round(stop_ms, 2)
    system.wait_unpinned()
    assert stop_ms < 250, "half of what the GPU was busy"


@pytest.mark.parametrize("by", ["number", "uuid"])
def test_what_a_child_forked_from_a_host_with_a_gpu_sees_is_recorded(
    gpu_machine: Machine, figures: dict[str, Any], by: str
) -> None:
    """A figure alone: whether the child can use the GPU depends on how the GPU is named."""
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    uuid = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    ended = subprocess.run(
        [sys.executable, "-c", FORKED],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid if by == "uuid" else "0"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    figures["exit status"], figures["seen"] = ended.returncode, (ended.stdout + ended.stderr)[-300:]


@pytest.fixture
def mps(is_fake: bool, run_dir: Path) -> Iterator[dict[str, str]]:
    """Environment of the clients of an MPS daemon of this test's own; its sockets need a short path."""
    control = None if is_fake else shutil.which("nvidia-cuda-mps-control")
    if control is None:
        pytest.skip("needs nvidia-cuda-mps-control and a real GPU")
    env = {
        "CUDA_MPS_PIPE_DIRECTORY": str(run_dir / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(run_dir / "log"),
    }
    for folder in env.values():
        Path(folder).mkdir()
    of_daemon = {**os.environ, **env}
    subprocess.run([control, "-d"], env=of_daemon, check=True, timeout=30)
    yield env
    subprocess.run([control], input="quit\n", text=True, env=of_daemon, check=True, timeout=60)


@pytest.mark.parametrize("kind", [REGION, SLAB])
def test_clients_of_mps_share_the_memory_of_a_store_outside_it(
    mps: dict[str, str], run_dir: Path, figures: dict[str, Any], kind: str
) -> None:
    outside = {"CUDA_MPS_PIPE_DIRECTORY": str(run_dir / "none")}
    with contextlib.closing(ProcessMachine(run_dir)) as machine:
        system = machine.start(env=mps, store_env=outside)
        figures["probe failures"] = system.probe_failures()
        assert figures["probe failures"] == []
        figures["ms"] = [round(system.pass_on(kind, 4096).all_ms, 3) for _ in range(10)]
        system.wait_unpinned()
