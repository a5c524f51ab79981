"""EngineCore's own loop over vLLM's own schedulers with parking in front; store, bus and worker are played.

`ParkingScheduler` runs one step at a time. `ParkingAsyncScheduler` runs as on a GPU: step N + 1 is scheduled
before the output of step N is handled. The worker keeps the KV cache a slot at a time, with what was
computed from zeros, so that it knows which tokens are wrong.
"""

import functools
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fake_engine import GATEWAY, INSTANCE, FakePinLink, FakeTalkLink, descriptor, metadata
from tests.support.played_engine import IDLE
from triptych_common.protocol.store import Pinned
from triptych_vllm_connector.consumer.consumer import Consumer
from triptych_vllm_connector.consumer.preallocator import make_preallocator
from triptych_vllm_connector.links.inbox import PinReply

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ECConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    from triptych_vllm_connector.connector import LostLoads, TriptychECConnector
    from triptych_vllm_connector.scheduler.parking_scheduler import ParkingAsyncScheduler, ParkingScheduler

MODEL = Path(__file__).parents[2] / "models" / "digits-vl"
BLOCK_SIZE = 16
STEP_TOKENS = 16
RIGHT, WRONG, TEXT = 7, 13, 5  # tokens: sampled from what is right, from zeros; of a prompt
SCHEDULERS: tuple[tuple[type[Any], int], ...] = ((ParkingScheduler, 1), (ParkingAsyncScheduler, 2))
"""Each with the steps that it keeps in flight."""


class Connector(TriptychECConnector):
    """The scheduler's half, without a store and a bus."""

    def __init__(self, vllm_config: VllmConfig, role: Any, consumer: Consumer) -> None:
        ECConnectorBase.__init__(self, vllm_config, role)
        self._writes, self._closers, self.writer, self.loader = {}, [], None, None
        self._consumer: Consumer | None = None
        self._opened = consumer

    def open_consumer(self, cache_size: int) -> Consumer:
        self._consumer = self._opened
        return self._opened


@functools.cache
def vllm_config() -> VllmConfig:
    """Of an engine without a tower, whose steps take `STEP_TOKENS` tokens."""
    with warnings.catch_warnings(action="ignore"):
        config = EngineArgs(
            model=str(MODEL),
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=512,
            max_num_seqs=8,
            enforce_eager=True,
            enable_prefix_caching=True,
            limit_mm_per_prompt={"image": 0, "video": 0},
            enable_mm_embeds=True,
            mm_processor_cache_gb=0,
            ec_transfer_config={
                "ec_connector": "TriptychECConnector",
                "ec_connector_module_path": "triptych_vllm_connector.connector",
                "ec_role": "ec_consumer",
                "ec_connector_extra_config": {},
            },
            ec_manager_config={
                "encoder_cache_manager_cls": "triptych_vllm_connector.scheduler.encoder_cache_manager."
                "PreallocatingEncoderCacheManager"
            },
        ).create_engine_config()
    config.scheduler_config.max_num_encoder_input_tokens = 1000
    return config


@functools.cache
def block_hasher() -> Any:
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    return get_request_block_hasher(BLOCK_SIZE, hash_fn)


@dataclass
class View:
    pin_id: int
    is_lost: bool


@dataclass
class Worker:
    """`model_executor`: runs steps in the order in which they come.

    `kv[block][slot]`: was it computed from zeros, or from what was? `losing`: items whose next load fails.
    `when_loading`: what happens, once, between the scheduling of a step that loads the item and its output.
    """

    engine: "ParkingEngine"
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
            output.ec_connector_output = ECConnectorOutput(ec_connector_worker_meta=LostLoads(lost))
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


class Core(EngineCore):
    """EngineCore without its start: no processes, no model."""

    def __init__(self, config: VllmConfig, scheduler: Any, worker: Worker, num_in_flight: int) -> None:
        self.vllm_config, self.scheduler, self.model_executor = config, scheduler, worker
        self.batch_queue_size = num_in_flight
        self.batch_queue: deque[Any] | None = deque(maxlen=num_in_flight) if num_in_flight > 1 else None
        self.log_stats = self.is_mm_encoder_only = self.is_pooling_model = False
        self.check_for_draft_tokens = self.use_spec_decode = False
        self.async_scheduling = num_in_flight > 1
        self.aborts_queue: Queue[Any] = Queue()
        self._weight_version = "default"
        self.step_fn = self.step if self.batch_queue is None else self.step_with_batch_queue


class Clock:
    now_s = 0.0


class ParkingEngine:
    """A turn of EngineCore's loop at a time. `told`: tokens of each request; `ended`: how it ended."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        scheduler_cls: type[Any],
        num_in_flight: int,
        budget: int = 4,
        num_blocks: int = 200,
    ) -> None:
        self.clock = Clock()
        monkeypatch.setattr(
            "triptych_vllm_connector.scheduler.parking_scheduler.time",
            SimpleNamespace(monotonic=lambda: self.clock.now_s),
        )
        self.pins, self.talk = FakePinLink(), FakeTalkLink()
        self.consumer = Consumer(
            INSTANCE,
            self.pins,
            self.talk,
            make_preallocator("sync", budget),
            lambda: 0,
            lambda: self.clock.now_s,
        )
        monkeypatch.setattr(
            ECConnectorFactory,
            "create_connector",
            lambda config, role: Connector(config, role, self.consumer),
        )
        config = vllm_config()
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.float32)
        self.scheduler = scheduler_cls(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self.worker = Worker(self)
        self.core = Core(config, self.scheduler, self.worker, num_in_flight)
        self.told: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.rows: dict[str, int] = {}
        self.num_pins = 0
        self.num_prompt_logprobs = 0

    # ---- what comes from outside -----------------------------------------------------------------
    def add(
        self,
        request_id: str,
        *items: str,
        rows: Sequence[int] = (4, 4),
        text: int = 2,
        max_tokens: int = 2,
        prompt_logprobs: int | None = None,
    ) -> Any:
        """`text` tokens stand before each item, and behind the last one."""
        features, offset = [], 0
        for item, length in zip(items, rows, strict=False):
            offset += text
            features.append(
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=item,
                    mm_position=PlaceholderRange(offset=offset, length=length),
                    mm_hash=item,
                )
            )
            offset += length
            self.rows[item] = length
            requester = (f"wire-{request_id}", len(features) - 1)
            self.consumer.post(metadata(item, requester, job_id=f"job-{item}-{request_id}"))
        params = {
            "request_id": f"wire-{request_id}",
            "gateway": GATEWAY,
            "traceparent": None,
            "remaining_ms": 1000,
            "items": [
                {"item_index": index, "mm_hash": item, "num_embeds": self.rows[item]}
                for index, item in enumerate(items)
            ],
        }
        request = Request(
            request_id=request_id,
            prompt_token_ids=[TEXT] * (offset + text),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                prompt_logprobs=prompt_logprobs,
                extra_args={"ec_transfer_params": params} if items else None,
            ),
            pooling_params=None,
            mm_features=features,
            block_hasher=block_hasher(),
        )
        self.scheduler.add_request(request)
        self.told[request_id] = []
        return request

    def comes(self, item: str) -> None:
        """The store says that it has the item, pinned."""
        self.num_pins += 1
        reply = Pinned(seq=1, pin_id=self.num_pins, descriptor=descriptor(item, self.rows[item]))
        self.consumer.post(PinReply(item, reply))

    def answer_pins(self) -> None:
        """The store has whatever it is asked for."""
        commands = self.pins.take()
        self.pins.commands = [each for each in commands if each[0] == "unpin"]
        for command, item in commands:
            if command == "pin_or_watch":
                self.comes(str(item))

    def abort(self, request_id: str) -> None:
        self.core.abort_requests([request_id])
        self.ended[request_id] = "abort"

    def preempt(self) -> None:
        """All that run start anew, as after a change of weights."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def preempt_one(self, request: Any) -> None:
        """As vLLM does while it schedules, when KV blocks are short."""
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)

    def reset_encoder_cache(self) -> None:
        self.core.reset_encoder_cache()

    # ---- the loop --------------------------------------------------------------------------------
    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def turn(self) -> None:
        """One of `run_busy_loop`: a step is scheduled, or an output is handled, or both."""
        outputs, _ = self.core.step_fn()
        for each in outputs.values() if outputs else ():
            for output in each.outputs:
                self._tell(output)

    def run(self) -> int:
        """Until the engine would wait for input; how many steps that took."""
        before = self.scheduler.num_steps
        while self.has_work:
            assert self.scheduler.num_steps < before + 200, "the engine steps and steps"
            self.turn()
        return int(self.scheduler.num_steps - before)

    def check_idle(self) -> None:
        """Everything has ended, and nothing wrong is left."""
        self.run()
        assert self.scheduler.requests == {}
        assert self.consumer.counts() == IDLE
        assert self.worker.views == {}
        assert self.wrong_blocks() == set()
        assert not self.scheduler._loads_in_flight._num_steps
        ended = sorted(pin_id for command, pin_id in self.pins.commands if command == "unpin")
        assert ended == list(range(1, self.num_pins + 1)), "each pin ends once"

    def wrong_blocks(self) -> set[int]:
        """Those in the prefix cache that were computed from zeros."""
        return {
            block.block_id
            for block in self.scheduler.kv_cache_manager.block_pool.blocks
            if block.block_hash is not None and any(self.worker.kv[block.block_id].values())
        }

    def _tell(self, output: Any) -> None:
        request_id = output.request_id
        assert request_id not in self.ended, f"{request_id} is told of after its end"
        self.told[request_id] += output.new_token_ids
        logprobs = output.new_prompt_logprobs_tensors
        assert logprobs is None or not logprobs[0].any(), "prompt logprobs from zeros"
        self.num_prompt_logprobs += logprobs is not None
        if output.finish_reason is not None:
            self.ended[request_id] = str(output.finish_reason)
