"""An encoder's trial encode: what does not fit is said at the start, with what to change."""

import logging
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.v1.worker.gpu_worker import Worker

    from triptych_vllm_connector.worker import encoder_memory, gpu_worker
    from triptych_vllm_connector.worker.encoder_memory import (
        EncoderMemoryError,
        GpuMemory,
        LargestStep,
        largest_steps,
        try_steps,
    )
    from triptych_vllm_connector.worker.gpu_worker import TriptychGPUWorker

GIB = 1 << 30


class Gpu:
    """A GPU of 80 GiB, with so much free; torch holds what was encoded."""

    def __init__(self, free_gib: float) -> None:
        self.num_free, self.num_held = int(free_gib * GIB), 0
        self.encoded: list[str] = []

    def step(self, modality: str, gib: float) -> LargestStep:
        def encode() -> None:
            if gib * GIB > self.num_free + self.num_held:
                raise torch.OutOfMemoryError("CUDA out of memory")
            more = max(0, int(gib * GIB) - self.num_held)
            self.num_held, self.num_free = self.num_held + more, self.num_free - more
            self.encoded.append(modality)

        return LargestStep(modality, 2, 16384, encode)

    def memory(self) -> GpuMemory:
        return GpuMemory(80 * GIB, self.num_free, self.num_held)


def test_steps_that_fit_stay_with_the_allocator(caplog: pytest.LogCaptureFixture) -> None:
    gpu = Gpu(free_gib=20)
    with caplog.at_level(logging.INFO):
        try_steps(iter([gpu.step("image", 6), gpu.step("video", 7)]), gpu.memory, 0.1)
    assert gpu.encoded == ["image", "video"]
    assert [each.getMessage() for each in caplog.records] == ["the encoder's largest steps fit"]


def test_a_step_that_does_not_fit_ends_the_start_with_the_remedy() -> None:
    gpu = Gpu(free_gib=5)
    with pytest.raises(EncoderMemoryError) as raised:
        try_steps(iter([gpu.step("image", 1), gpu.step("video", 9)]), gpu.memory, 0.1)
    for part in ("2 video item(s) of 16384 rows", "4.0 of 80.0 GiB", "--max-num-batched-tokens"):
        assert part in str(raised.value)


def test_an_encoder_above_its_share_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    gpu = Gpu(free_gib=40)
    try_steps(iter([gpu.step("image", 9)]), gpu.memory, 0.1)
    (record,) = caplog.records
    assert record.getMessage() == "the encoder takes more than its share of the GPU"


class FakeBudget:
    """vLLM's budget of a model with images of 100 rows and videos of 400, eight images a step."""

    mm_max_toks_per_item = {"image": 100, "video": 400, "audio": 0}  # noqa: RUF012
    mm_max_items_per_batch = {"image": 8, "video": 2, "audio": 0}  # noqa: RUF012

    def __init__(self, *_: object, **__: object) -> None: ...

    def get_dummy_encoder_profile_inputs(self, modality: str, num_items: int) -> list[tuple[str, str]]:
        return [] if modality == "audio" else [(modality, "dummy")] * num_items


def test_images_are_tried_together_and_other_items_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[tuple[str, int]] = []
    monkeypatch.setattr(encoder_memory, "MultiModalBudget", FakeBudget)
    monkeypatch.setattr(
        encoder_memory,
        "group_and_batch_mm_kwargs",
        lambda items, **_: iter([(items[0][0], len(items), {"of": (items[0][0], len(items))})]),
    )
    model = SimpleNamespace(embed_multimodal=lambda of: encoded.append(of))  # noqa: PLW0108 -- by keyword
    runner = SimpleNamespace(supports_mm_inputs=True, get_model=lambda: model, device=None)
    worker: Any = SimpleNamespace(model_runner=runner, vllm_config=None)
    steps = [(each.encode(), each.modality, each.num_items) for each in largest_steps(worker)]
    assert [each[1:] for each in steps] == [("image", 8), ("video", 1)]
    assert encoded == [("image", 8), ("video", 1)]


@pytest.mark.parametrize("is_producer", [True, False])
def test_encoders_alone_try_when_their_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, is_producer: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Worker, "load_model", lambda self, **_: calls.append("loaded"))
    monkeypatch.setattr(gpu_worker, "try_largest_steps", lambda worker: calls.append("tried"))
    worker = object.__new__(TriptychGPUWorker)
    worker.vllm_config = SimpleNamespace(ec_transfer_config=SimpleNamespace(is_ec_producer=is_producer))
    worker.load_model(load_dummy_weights=False)
    assert calls == (["loaded", "tried"] if is_producer else ["loaded"])
