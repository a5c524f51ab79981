"""EngineCore's own loop over vLLM's own schedulers with parking in front; store, bus and worker are played.

`ParkingScheduler` runs one step at a time. `ParkingAsyncScheduler` runs as on a GPU: step N + 1 is scheduled
before the output of step N is handled.
"""

import functools
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import (
    GATEWAY,
    INSTANCE,
    FakeMessageSender,
    FakePinLink,
    descriptor,
    metadata,
)
from tests.support.vllm_connector.parking_worker import BLOCK_SIZE, ParkingWorker
from tests.support.vllm_connector.played_engine import IDLE
from triptych_common.protocol.store import Pinned
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.consumer.consumer import Consumer, Inbox, PinReply
from triptych_vllm_connector.consumer.ports import EncoderCache
from triptych_vllm_connector.consumer.preallocator import make_preallocator

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    import torch
    from vllm.config import VllmConfig
    from vllm.config.lora import LoRAConfig
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    from triptych_vllm_connector.connector import TriptychECConnector
    from triptych_vllm_connector.scheduler.parking_scheduler import ParkingAsyncScheduler, ParkingScheduler

MODEL = Path(__file__).parents[3] / "models" / "digits-vl"
STEP_TOKENS = 16
TEXT = 5  # a token of a prompt
SCHEDULERS: tuple[tuple[type[Any], int], ...] = ((ParkingScheduler, 1), (ParkingAsyncScheduler, 2))
"""Each with the steps that it keeps in flight."""


class Connector(TriptychECConnector):
    """The scheduler's half, without a store and a bus."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: Any,
        make_consumer: Callable[[EncoderCache], Consumer],
        config: ConnectorConfig,
    ) -> None:
        ECConnectorBase.__init__(self, vllm_config, role)
        self._writes, self._closers, self.writer, self.loader = {}, [], None, None
        self.config = config
        self._consumer: Consumer | None = None
        self._plans_local = False
        self._refused: set[str] = set()
        self._make_consumer = make_consumer

    def open_consumer(self, cache: EncoderCache, cache_size: int) -> Consumer:
        self._consumer = self._make_consumer(cache)
        return self._consumer


def one_layer_scheduler(
    scheduler_cls: type[Scheduler], config: VllmConfig, num_blocks: int, block_size: int
) -> Scheduler:
    """One of vLLM's, or a subclass, over a KV cache of one layer."""
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return scheduler_cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=block_size,
        log_stats=True,
    )


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


def connector_config(*, overlap: bool = False, **options: Any) -> ConnectorConfig:
    return ConnectorConfig(
        instance=INSTANCE,
        deployment="test",
        redis_url="redis://none",
        store_socket=Path("none"),
        namespace_digest="0" * 64,
        overlap=overlap,
        **options,
    )


@functools.cache
def block_hasher() -> Any:
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    return get_request_block_hasher(BLOCK_SIZE, hash_fn)


class Core(EngineCore):
    """EngineCore without its start: no processes, no model."""

    def __init__(self, config: VllmConfig, scheduler: Any, worker: ParkingWorker, num_in_flight: int) -> None:
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
    """A turn of EngineCore's loop at a time. `tokens`: tokens of each request; `ended`: how it ended."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        scheduler_cls: type[Any],
        num_in_flight: int,
        budget: int = 4,
        num_blocks: int = 200,
        max_num_seqs: int = 8,
        policy: str = "fcfs",
        max_loras: int = 0,
        **overlap: Any,
    ) -> None:
        self.clock = Clock()
        self.pins, self.sender, self.inbox = FakePinLink(), FakeMessageSender(), Inbox()

        def make_consumer(cache: EncoderCache) -> Consumer:
            return Consumer(
                INSTANCE,
                self.pins,
                self.sender,
                make_preallocator("sync", budget),
                cache,
                self.inbox,
                now_ns=lambda: 0,
                now=lambda: self.clock.now_s,
            )

        monkeypatch.setattr(
            ECConnectorFactory,
            "create_connector",
            lambda config, role: Connector(config, role, make_consumer, connector_config(**overlap)),
        )
        config = vllm_config()
        config.scheduler_config.max_num_seqs, config.scheduler_config.policy = max_num_seqs, policy
        config.scheduler_config.async_scheduling = num_in_flight > 1
        config.lora_config = LoRAConfig(max_loras=max_loras) if max_loras else None
        self.scheduler = one_layer_scheduler(scheduler_cls, config, num_blocks, BLOCK_SIZE)
        self.consumer: Consumer = self.scheduler.consumer
        self.worker = ParkingWorker(self)
        self.core = Core(config, self.scheduler, self.worker, num_in_flight)
        self.tokens: dict[str, list[int]] = {}
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
        token: int = TEXT,
        flow: str = "",
        adapter: int = 0,
    ) -> Any:
        """`text` tokens stand before each item, and behind the last one. They are all `token`.

        `adapter`: the number of a LoRA adapter; 0: of none.
        """
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
            self.inbox.post_event(metadata(item, requester, job_id=f"job-{item}-{request_id}"))
        params = {
            "request_id": f"wire-{request_id}",
            "gateway": GATEWAY,
            "traceparent": None,
            "remaining_ms": 1000,
            "flow": flow,
            "items": [
                {"item_index": index, "mm_hash": item, "modality": "image", "num_embeds": self.rows[item]}
                for index, item in enumerate(items)
            ],
        }
        request = Request(
            request_id=request_id,
            prompt_token_ids=[token] * (offset + text),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                prompt_logprobs=prompt_logprobs,
                extra_args={"ec_transfer_params": params} if items or flow else None,
            ),
            pooling_params=None,
            lora_request=LoRARequest(f"adapter-{adapter}", adapter, "none") if adapter else None,
            mm_features=features,
            block_hasher=block_hasher(),
        )
        self.scheduler.add_request(request)
        self.tokens[request_id] = []
        return request

    def comes(self, item: str) -> None:
        """The store replies that it has the item, pinned."""
        self.num_pins += 1
        reply = Pinned(seq=1, pin_id=self.num_pins, descriptor=descriptor(item, self.rows[item]))
        self.inbox.post_event(PinReply(item, reply))

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
                self._on_output(output)

    def run(self, *items: str) -> int:
        """Until the engine would wait for input, after `items` came; how many steps that took."""
        for item in items:
            self.comes(item)
        before = self.scheduler.num_steps
        while self.has_work:
            assert self.scheduler.num_steps < before + 200, "the engine steps and steps"
            self.turn()
        return int(self.scheduler.num_steps - before)

    def until(self, holds: Callable[[], bool]) -> None:
        """Turn until it holds."""
        for _ in range(100):
            if holds():
                return
            assert self.has_work, "the engine waits for input"
            self.turn()
        raise AssertionError("it never holds")

    def computed(self) -> dict[str, int]:
        """Tokens in the KV cache, by request that runs."""
        return {each.request_id: each.num_computed_tokens for each in self.scheduler.running}

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

    def _on_output(self, output: Any) -> None:
        request_id = output.request_id
        assert request_id not in self.ended, f"{request_id} has output after its end"
        self.tokens[request_id] += output.new_token_ids
        logprobs = output.new_prompt_logprobs_tensors
        assert logprobs is None or not logprobs[0].any(), "prompt logprobs from zeros"
        self.num_prompt_logprobs += logprobs is not None
        if output.finish_reason is not None:
            self.ended[request_id] = str(output.finish_reason)
