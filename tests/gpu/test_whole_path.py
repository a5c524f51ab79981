"""The whole path on an NVIDIA GPU, by each transport: the same system and strips; skipped without one."""

from types import ModuleType

import pytest

from tests.support.cuda.gpu import why_no_gpu

if (reason := why_no_gpu()) is not None:
    pytest.skip(reason, allow_module_level=True)
pytest.importorskip("vllm", reason="vLLM is not installed; the transports alone need none")

from tests.support.real.system import image_part, running_system
from tests.support.waiting import wait_until
from triptych_common.cores.mps import CudaEnvironment
from triptych_common.protocol.messages import Transport


@pytest.mark.parametrize("transport", [Transport.CUDA_IPC, Transport.PINNED_SHM])
def test_handwriting_is_read_on_a_gpu(strips: ModuleType, transport: Transport) -> None:
    """`auto` takes the slab that `up` makes where both engines share a GPU; without one the region."""
    samples = strips.held_out_strips(10, length=3, seed=61)
    env = {} if transport is Transport.CUDA_IPC else {"TRIPTYCH_SLAB_BYTES": "0"}
    gpu = (CudaEnvironment().cuda_visible_devices or "0").split(",")[0]
    with running_system(CUDA_VISIBLE_DEVICES=gpu, **env) as system:
        answers = [
            system.ask([image_part(sample.png), {"type": "text", "text": "read the digits"}]).text.strip()
            for sample in samples
        ]
        again = system.ask([image_part(samples[0].png), {"type": "text", "text": "read the digits"}])
        spans = system.trace(again.request_id, "prefill.inject")
        assert "encoder.encode" not in {span.name for span in spans}
        (inject,) = (span for span in spans if span.name == "prefill.inject")
        assert inject.attributes["triptych.transport"] == transport
        wait_until(lambda: system.store_stats().num_pins == 0, 10, "all pins end")
    right = sum(answer == sample.digits for answer, sample in zip(answers, samples, strict=True))
    assert right >= 9, f"{right} of 10 right"
