"""The worker of a `ParkingEngine`: vLLM's `model_executor`, which runs steps without a model.

It keeps the KV cache a slot at a time, with what was computed from zeros, so that it knows which tokens are
wrong.
"""

import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    import torch
    from vllm.v1.outputs import ECConnectorOutput, ModelRunnerOutput

    from triptych_vllm_connector.step_metadata import LoadReport

BLOCK_SIZE = 16
RIGHT, WRONG = 7, 13  # tokens: sampled from what is right, from zeros


@dataclass
class View:
    pin_id: int
    is_lost: bool


@dataclass
class ParkingWorker:
    """`model_executor`: runs steps in the order in which they come.

    `kv[block][slot]`: was it computed from zeros, or from what was? `losing`: items whose next load fails.
    `when_loading`: what happens, once, between the scheduling of a step that loads the item and its output.
    """

    engine: Any  # ParkingEngine
    views: dict[str, View] = field(default_factory=dict)
    kv: dict[int, dict[int, bool]] = field(default_factory=dict)
    losing: set[str] = field(default_factory=set)
    when_loading: dict[str, Callable[[], object]] = field(default_factory=dict)
    prompts_done: set[str] = field(default_factory=set)  # of which the prompt's logprobs were made
    outputs: deque[ModelRunnerOutput] = field(default_factory=deque)

    def execute_model(self, step: Any, non_block: bool) -> "Future[ModelRunnerOutput | None]":
        future: Future[ModelRunnerOutput | None] = Future()
        output = self._run(step)
        for order in step.ec_connector_metadata.loads:
            self.when_loading.pop(order.mm_hash, bool)()
        if step.total_num_scheduled_tokens:
            self.outputs.append(output)
            future.set_result(None)  # as GPU runners do: the tokens come with `sample_tokens`
        else:
            future.set_result(output)
        return future

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        output = self.outputs.popleft()
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def reset_encoder_cache(self) -> None:
        while self.views:
            self.engine.pins.unpin(self.views.popitem()[1].pin_id)

    def _run(self, step: Any) -> ModelRunnerOutput:
        for item in step.free_encoder_mm_hashes:
            if item in self.views:
                self.engine.pins.unpin(self.views.pop(item).pin_id)
        lost = self._load(step.ec_connector_metadata.loads)
        scheduler = self.engine.scheduler
        ids = list(step.num_scheduled_tokens)
        sampled: list[list[int]] = []
        prompt_logprobs = {}
        for request_id in ids:
            request = scheduler.requests[request_id]
            end = request.num_computed_tokens  # vLLM counts them when it schedules
            is_wrong = self._compute(request, end - step.num_scheduled_tokens[request_id], end)
            sampled.append([] if request.is_prefill_chunk else [WRONG if is_wrong else RIGHT])
            is_wanted = request.sampling_params.prompt_logprobs is not None
            if is_wanted and not request.is_prefill_chunk and request_id not in self.prompts_done:
                self.prompts_done.add(request_id)
                prompt_logprobs[request_id] = (torch.tensor([float(is_wrong)]),)
        output = ModelRunnerOutput(ids, {each: index for index, each in enumerate(ids)}, sampled)
        output.prompt_logprobs_dict = prompt_logprobs
        if lost:
            output.ec_connector_output = ECConnectorOutput(ec_connector_worker_meta=LoadReport(lost))
        return output

    def _load(self, orders: list[Any]) -> frozenset[str]:
        lost = {order.mm_hash for order in orders} & self.losing
        self.losing -= lost
        for order in orders:
            if order.mm_hash in self.views:  # evicted and loaded in one pass: replaced
                self.engine.pins.unpin(self.views.pop(order.mm_hash).pin_id)
            self.views[order.mm_hash] = View(order.pin_id, order.mm_hash in lost)
        return frozenset(lost)

    def _compute(self, request: Any, start: int, end: int) -> bool:
        """Whether what the window made is wrong."""
        (blocks,) = self.engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)

        def slot(position: int) -> tuple[dict[int, bool], int]:
            block = blocks[position // BLOCK_SIZE]
            return self.kv.setdefault(block, {}), position % BLOCK_SIZE

        is_wrong = False
        for position in range(start):
            block, index = slot(position)
            assert index in block, "the step reads KV that was never computed"
            is_wrong |= block[index]
        for position in range(start, end):
            is_wrong |= self._reads_zeros(request, position)
            block, index = slot(position)
            block[index] = is_wrong
        return is_wrong

    def _reads_zeros(self, request: Any, position: int) -> bool:
        for feature in request.mm_features:
            place = feature.mm_position
            if place.offset <= position < place.offset + place.length:
                assert feature.identifier in self.views, "the step reads an item that is not there"
                return self.views[feature.identifier].is_lost
        return False
