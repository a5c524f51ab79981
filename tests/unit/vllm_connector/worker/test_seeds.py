"""A prompt that is not computed to its end takes nothing of its seed, and ends no engine on a CPU."""

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from triptych_vllm_connector.worker.runner_wrappers import wrap


class Runner:
    """vLLM's, as it samples: what is dropped has its generator set back by an offset."""

    def __init__(self, device: str, dropped: list[bool], error: Exception | None = None) -> None:
        self.device = torch.device(device)
        self._error = error
        num_reqs = len(dropped)
        generators = {index: torch.Generator().manual_seed(index) for index in range(num_reqs)}
        self.input_batch = SimpleNamespace(num_reqs=num_reqs, generators=generators)
        self.discard_request_mask = SimpleNamespace(np=np.array([*dropped, True, True]))  # larger, as vLLM's
        self.sampled: dict[int, float] = {}

    def _execute_mm_encoder(self) -> None:
        """Marks a runner of vLLM's first generation."""

    def sample_tokens(self, grammar_output: Any) -> str:
        for index, generator in self.input_batch.generators.items():
            self.sampled[index] = torch.rand(1, generator=generator).item()
        if self._error is not None:
            raise self._error
        if self.device.type == "cpu":
            for index in np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]:
                generator = self.input_batch.generators.get(int(index))
                if generator is not None:
                    generator.set_offset(generator.get_offset() - 4)
        return "sampled"


def first_of(seed: int) -> float:
    return torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()


def test_a_seed_begins_with_the_first_token_that_counts() -> None:
    runner = wrap(Runner("cpu", [True, False, True]), is_producer=False)
    assert runner.sample_tokens(None) == "sampled"
    assert runner.sampled == {1: first_of(1)}, "others go on"
    runner.discard_request_mask.np[:] = False
    assert runner.sample_tokens(None) == "sampled"
    assert (runner.sampled[0], runner.sampled[2]) == (first_of(0), first_of(2))
    assert sorted(runner.input_batch.generators) == [0, 1, 2]


def test_an_error_loses_no_generator() -> None:
    runner = wrap(Runner("cpu", [True, False], RuntimeError("no")), is_producer=False)
    with pytest.raises(RuntimeError, match="no"):
        runner.sample_tokens(None)
    assert sorted(runner.input_batch.generators) == [0, 1]


def test_on_a_gpu_vllm_does_it_itself() -> None:
    runner = wrap(Runner("cuda", [True, False]), is_producer=False)
    runner.sample_tokens(None)
    assert sorted(runner.sampled) == [0, 1]
