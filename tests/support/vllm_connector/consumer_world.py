"""A model of everything around the consumer: cache store, encoders, gateway, vLLM's scheduler and worker.

Each acts only when a test makes it, in any order. Messages are delivered in any order too, except that a
session's end comes last. The models state what must never happen as assertions.
"""

from collections import deque

from tests.support.vllm_connector.consumer_checks import ROWS, Running
from tests.support.vllm_connector.consumer_neighbours import SenderModel, StoreModel
from tests.support.vllm_connector.consumer_scheduler import PlayedScheduler, Window
from tests.support.vllm_connector.fake_engine import (
    INSTANCE,
    fake_request,
    metadata,
    whole_request,
)
from triptych_vllm_connector.consumer.consumer import Consumer, Inbox
from triptych_vllm_connector.consumer.local_encode import LocalEncode
from triptych_vllm_connector.consumer.overlap import NO_OVERLAP, OverlapPolicy
from triptych_vllm_connector.consumer.preallocator import make_preallocator


class World(PlayedScheduler):
    """See the module docstring. `kv_tokens`: the KV cache's size; a request runs if it fits whole."""

    def __init__(
        self,
        strategy: str,
        budget: int,
        kv_tokens: int,
        max_in_flight: int,
        overlap: OverlapPolicy = NO_OVERLAP,
    ) -> None:
        self.store = StoreModel()
        self.sender = SenderModel()
        self.budget = budget if strategy == "sync" else None
        self.preallocator = make_preallocator(strategy, budget)
        encodes_request = LocalEncode(lambda modality: {"image_grid_thw"}).encodes_request
        self.inbox = Inbox()
        self.consumer = Consumer(
            INSTANCE,
            self.store,
            self.sender,
            self.preallocator,
            self,
            self.inbox,
            encodes_request=encodes_request,
            overlap=overlap,
            now_ns=lambda: 0,
        )
        self.kv_tokens = kv_tokens
        self.max_in_flight = max_in_flight
        self.live: dict[str, Running] = {}
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.parked: set[str] = set()
        self.cached: dict[str, set[str]] = {}  # the encoder cache manager's view
        self.freed: list[str] = []
        self.worker: dict[str, int | None] = {}  # the worker's encoder cache: the pin of each view
        self.encodes: list[str] = []  # items that the step under construction encodes
        self.in_flight: deque[list[Window]] = deque()
        self.orders: set[tuple[str, str]] = set()  # (wire id, item)
        self.num_requests = 0
        self.num_jobs = 0
        self.expected_acks: set[tuple[str, str, int]] = set()  # (job, wire id, place)

    # ---- gateway and encoders --------------------------------------------------------------------
    def add(
        self,
        items: list[str],
        *,
        has_gateway: bool,
        request_id: str | None,
        is_ordered: bool,
        prefix: int = 0,
        is_local: bool = False,
    ) -> None:
        self.num_requests += 1
        gateway = "gateway-0" if has_gateway else None
        rows, engine_request_id = [(item, ROWS[item]) for item in items], f"r{self.num_requests}"
        if is_local:
            request = whole_request(engine_request_id, rows, gap=1)
        else:
            request = fake_request(engine_request_id, rows, request_id=request_id, gateway=gateway, gap=1)
        last = request.mm_features[-1].mm_position
        prompt_len = last.offset + last.length + 2
        added = Running(request=request, prompt_len=prompt_len, prefix=min(prefix, prompt_len - 1))
        self.live[added.engine_request_id] = added
        self.waiting.append(added.engine_request_id)
        if is_ordered:
            self.orders |= {(added.request_id, item) for item in items}

    def gateway_receives(self, index: int) -> None:
        message = self.sender.needs.pop(index)
        if message.request_id in {each.request_id for each in self.live.values()}:
            self.orders.add((message.request_id, message.mm_hash))

    def encode(self, request_id: str, item: str) -> None:
        """An encoder takes an order: it reserves, and sends metadata. Orders of the dead are dropped."""
        self.orders.discard((request_id, item))
        requesters = {
            (each.request_id, place)
            for each in self.live.values()
            for place, feature in enumerate(each.request.mm_features)
            if feature.identifier == item and each.request_id == request_id
        }
        if not requesters:
            return
        if item not in self.store.sealed:
            self.store.writing.add(item)
        self.num_jobs += 1
        job_id = f"job-{self.num_jobs}"
        self.expected_acks |= {(job_id, *requester) for requester in requesters}
        self.store.to_engine.append(metadata(item, *sorted(requesters), job_id=job_id))

    # ---- what the consumer gets ------------------------------------------------------------------
    def deliver(self, index: int) -> None:
        self.inbox.post_event(self.store.to_engine.pop(index))

    def lose_store(self) -> None:
        self.store.lose()
        while self.store.to_engine:
            self.deliver(0)

    # ---- what operators and gateways that hang do -------------------------------------------------
    def reset_encoder_cache(self) -> None:
        """Between two steps: scheduler and worker forget every item."""
        while self.in_flight:
            self.update()
        for each in self.live.values():
            each.inputs.clear()
        self.cached.clear()
        self.freed.clear()
        self.consumer.on_cache_emptied()
        while self.worker:
            self._drop_view(self.worker.popitem()[1])

    def end_overdue(self, engine_request_id: str) -> None:
        """The time of a request that does not run is up."""
        self.consumer.fail_overdue(self.live[engine_request_id].request)

    # ---- the end ---------------------------------------------------------------------------------
    def run_to_the_end(self) -> None:
        """No more faults: every request is served."""
        self.store.refuses_next = False
        for _ in range(20 + 30 * len(self.live)):
            self._settle()
            self.schedule(100)
            while self.in_flight:
                self.update()
            for engine_request_id in self.answered:
                self.finish(engine_request_id)
            if not self.live:
                break
        assert not self.live, f"never served: {sorted(self.live)}"
        self._settle()
        self.consumer.drain_inbox()
        self.schedule(1)  # vLLM steps once more: the worker drops its views
        self._settle()

    def _settle(self) -> None:
        """Store, encoders and gateway do all that is to do."""
        while (
            self.sender.needs
            or self.orders
            or self.store.writing
            or self.store.commands
            or self.store.to_engine
        ):
            while self.sender.needs:
                self.gateway_receives(0)
            for request_id, item in sorted(self.orders):
                self.encode(request_id, item)
            for item in sorted(self.store.writing):
                self.store.seal(item)
            while self.store.commands:
                self.store.run_next()
            while self.store.to_engine:
                self.deliver(0)
