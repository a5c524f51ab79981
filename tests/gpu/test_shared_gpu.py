"""Two engines on one GPU: the plan starts them, answers are right, and `status` names what shares the GPU.

The first tests need the driver alone; the last one needs vLLM, and is skipped without. No MPS daemon is
started here: where one runs, its tests run too.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.cuda.gpu import why_no_gpu

if (reason := why_no_gpu()) is not None:
    pytest.skip(reason, allow_module_level=True)

import torch

from tests.support.vllm_connector.fake_store_worker import worker_config
from triptych_common.cores.gpu_plan import MpsLimits
from triptych_common.cores.mps import CudaEnvironment, has_mps_daemon
from triptych_common.protocol.messages import Sharing
from triptych_common.region.cuda.loading import load_driver
from triptych_vllm_connector.worker.cores.opening import gpu_compute

PROBE = """
from triptych_common.region.cuda.loading import load_driver
driver = load_driver()
print(driver.num_multiprocessors(), driver.is_mps_client())
"""


def seen_by_a_process(limits: MpsLimits) -> tuple[int, bool]:
    """Multiprocessors that a process with these limits may use, and whether it is a client of MPS."""
    environment = {**os.environ, **limits.environment()}
    ended = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    number, is_mps_client = ended.stdout.split()
    return int(number), is_mps_client == "True"


def test_the_driver_says_what_shares_the_gpu(tmp_path: Path) -> None:
    config = worker_config(tmp_path).model_copy(update={"gpu_engines": 2})
    driver = load_driver()
    compute = gpu_compute(config, driver, CudaEnvironment())
    assert compute.sharing is (Sharing.MPS if driver.is_mps_client() else Sharing.TIME_SLICES)
    assert compute.num_multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count


def test_limits_count_under_mps_and_nowhere_else() -> None:
    whole, is_mps_client = seen_by_a_process(MpsLimits())
    limited, _ = seen_by_a_process(MpsLimits(thread_percentage=50, priority=1))
    if is_mps_client:
        assert has_mps_daemon(), "it is found where CUDA finds it"
        assert limited <= (whole + 1) // 2
    else:
        assert limited == whole


@pytest.mark.parametrize("policy", ["split", "text_first", "image_first"])
def test_two_engines_on_one_gpu(policy: str, strips: ModuleType) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed; the driver alone needs none")
    from tests.support.real.system import image_part, running_system

    gpu = (CudaEnvironment().cuda_visible_devices or "0").split(",")[0]
    samples = strips.held_out_strips(10, length=3, seed=62)
    with running_system("--core-policy", policy, CUDA_VISIBLE_DEVICES=gpu, COLUMNS="200") as system:
        lines = [line.split() for line in system.command("status").stdout.splitlines()]
        answers = [
            system.ask([image_part(sample.png), {"type": "text", "text": "read the digits"}]).text.strip()
            for sample in samples
        ]
    rows = {words[0]: " ".join(words[1:]) for words in lines if "multiprocessors" in words}
    assert rows.keys() == {"encoder-0", "prefill_decode-0"}, lines
    mechanism = "mps" if load_driver().is_mps_client() else "time_slices"
    assert all(f"{mechanism} with 1 other" in row for row in rows.values()), rows
    assert all(row.endswith(policy if mechanism == "mps" else "-") for row in rows.values()), rows
    right = sum(answer == sample.digits for answer, sample in zip(answers, samples, strict=True))
    assert right >= 9, f"{right} of 10 right"
