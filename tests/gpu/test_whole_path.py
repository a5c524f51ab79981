"""The whole path on an NVIDIA GPU: the same system, the same strips. Skipped where there is none."""

from types import ModuleType

import pytest

from tests.support.cuda.gpu import why_no_gpu

if (reason := why_no_gpu()) is not None:
    pytest.skip(reason, allow_module_level=True)
pytest.importorskip("vllm", reason="vLLM is not installed; the transports alone need none")

from tests.support.real.system import image_part, running_system
from tests.support.waiting import wait_until


def test_handwriting_is_read_on_a_gpu(strips: ModuleType) -> None:
    samples = strips.held_out_strips(10, length=3, seed=61)
    with running_system() as system:
        answers = [
            system.ask([image_part(sample.png), {"type": "text", "text": "read the digits"}]).text.strip()
            for sample in samples
        ]
        again = system.ask([image_part(samples[0].png), {"type": "text", "text": "read the digits"}])
        assert "encoder.encode" not in {
            span.name for span in system.trace(again.request_id, "prefill.inject")
        }
        wait_until(lambda: system.store_stats().num_pins == 0, 10, "all pins end")
    right = sum(answer == sample.digits for answer, sample in zip(answers, samples, strict=True))
    assert right >= 9, f"{right} of 10 right"
