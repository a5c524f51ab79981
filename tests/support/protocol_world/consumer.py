"""The real `Consumer` with its preallocator and links; vLLM's scheduler and worker are played.

One engine step computes a whole prompt, or `step_tokens` of it, or as much of it as its items allow. What it
computed is known at the next step; with two steps in flight, at the one after that, as under async
scheduling. The decode is one step long. Of the KV cache only its size is modelled: a request begins when its
whole prompt fits, and holds that much; with overlap the real `PartialRequests` say who begins in part, and
stalled requests give way.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from tests.support.protocol_world.config import Config
from tests.support.protocol_world.kv_room import MAX_PARTIAL, KvRoom
from tests.support.protocol_world.network import NAMES, Network, ThreadedBusModel
from tests.support.protocol_world.steps import EncoderInputs, Running, Step, Window
from tests.support.protocol_world.store import ClientSession, StoreActor
from tests.support.protocol_world.virtual_loop import CLOCK
from tests.support.vllm_connector.fake_engine import FakeRequest, fake_request, whole_request
from triptych_common.protocol.messages import Message
from triptych_common.protocol.store import Unpin
from triptych_vllm_connector.consumer.consumer import Consumer, Inbox, PinReply, StoreLost
from triptych_vllm_connector.consumer.local_encode import LocalEncode
from triptych_vllm_connector.consumer.overlap import OverlapPolicy
from triptych_vllm_connector.consumer.preallocator import make_preallocator
from triptych_vllm_connector.links.opening import BusMessageSender
from triptych_vllm_connector.links.readable_pins import StorePins
from triptych_vllm_connector.scheduler.failed_loads import LoadsInFlight, undo_failed_loads
from triptych_vllm_connector.scheduler.partial_preemption import PartialRequests

OWN = 0  # in place of a pin: the tower made the item


class EngineDiedError(Exception):
    """EngineCore raised: the process ends."""


class ConsumerActor(KvRoom, EncoderInputs):
    """One prefill_decode."""

    def __init__(self, name: str, network: Network, store: StoreActor, config: Config) -> None:
        self.name = name
        self.budget = config.budget if config.strategy == "sync" else None
        self._network = network
        self.store = store
        self._strategy = config.strategy, config.budget
        self._num_choices = config.num_choices
        self._prefix = config.prefix
        self._steps_in_flight = config.steps_in_flight
        self.step_tokens = config.step_tokens
        self._overlap = OverlapPolicy(is_on=config.overlap, min_tokens=1)
        self.num_kv_blocks = config.num_kv_blocks
        self.num_scheduled = 0
        self.num_whole = 0
        self.is_up = False
        self.start()

    def start(self) -> None:
        self.is_up, self.must_end, self.has_news = True, False, False
        self.preallocator = make_preallocator(*self._strategy)
        self.live = {}
        self.waiting: list[str] = []
        self.running = []
        self.parked: dict[str, None] = {}
        self.cached = {}  # the encoder cache manager's view
        self.freed, self.encodes = [], []
        self.views: dict[
            str, int | None
        ] = {}  # the worker's encoder cache: the pin of each view, OWN, or zeros
        self.in_flight: deque[Step] = deque()
        self.loads_in_flight = LoadsInFlight()
        self.preempts_late = False  # the next step finds too late that the KV cache is full
        self.loses_load = False  # the worker cannot read the next item
        self.inbox = Inbox()
        self.inbox.attach_waker(self._wake)
        self.engine = ClientSession(
            self.store, f"{self.name}/engine", Future, self.inbox.post_event, self._on_lost
        )
        self.worker = ClientSession(self.store, f"{self.name}/worker-0", Future)
        session: Any = self.engine
        bus: Any = ThreadedBusModel(self._network, self.name)
        pins = StorePins(session, 1, lambda mm_hash, reply: self.inbox.post_event(PinReply(mm_hash, reply)))
        sender = BusMessageSender(bus, NAMES)
        self.consumer = Consumer(
            self.name,
            pins,
            sender,
            self.preallocator,
            self,
            self.inbox,
            encodes_request=LocalEncode(lambda modality: {"image_grid_thw"}).encodes_request,
            overlap=self._overlap,
            now_ns=lambda: 0,
            now=CLOCK.monotonic,
        )

        self.partial = PartialRequests(
            self.num_kv_blocks // 2, MAX_PARTIAL, lambda each: self.consumer.num_missing(each) > 0
        )

    @property
    def sessions(self) -> tuple[ClientSession, ...]:
        return (self.engine, self.worker)

    def crash(self) -> None:
        """The connections of its requests break."""
        self.is_up = False
        for session in self.sessions:
            session.kill()
        broken = [
            (each.gateway, each.request_id, each.attempt) for each in self.live.values() if each.gateway
        ]
        for way in self._network.ways_to(self.name):
            if way[2] == "http":
                under_way = self._network.drop(way)
                broken += [(way[0], frame[1], frame[2]) for frame in under_way if frame[0] != "abort"]
        for gateway, request_id, attempt in dict.fromkeys(broken):
            self._network.send((self.name, gateway, "http"), ("broken", request_id, attempt))

    def _on_lost(self) -> None:
        self.inbox.post_event(StoreLost())

    def _wake(self) -> None:
        self.has_news = True

    # ---- transitions -----------------------------------------------------------------------------
    def receive(self, message: Message) -> None:
        """Of its stream."""
        self.inbox.post_event(message)  # type: ignore[arg-type]

    def hear_http(self, gateway: str, frame: tuple[str, str, int, Any]) -> None:
        """A request, or the end of its connection."""
        what, request_id, attempt, body = frame
        self.has_news = True
        if what == "abort":
            for each in self._choices(request_id, attempt):
                self._finish(each.engine_request_id)
            return
        remaining_ms, rows = body
        for choice in range(self._num_choices):
            self._add(gateway, request_id, attempt, remaining_ms, rows, choice=choice)

    def _choices(self, request_id: str, attempt: int) -> list[Running]:
        """The engine's requests of one request, as many as it is answered by."""
        return [
            each for each in self.live.values() if (each.request_id, each.attempt) == (request_id, attempt)
        ]

    def _add(
        self,
        gateway: str,
        request_id: str,
        attempt: int,
        remaining_ms: int,
        rows: Sequence[tuple[str, int]],
        num_texts: int = 1,
        choice: int = 0,
    ) -> Running:
        """A request whose prompt ends with so many tokens of text."""
        engine_request_id = f"{choice or ''}{request_id}-{attempt}"
        request = fake_request(engine_request_id, list(rows), request_id=request_id, gateway=gateway, gap=1)
        assert request.ec_transfer_params is not None
        request.ec_transfer_params["remaining_ms"] = remaining_ms
        return self._take_in(request, gateway, request_id, attempt, num_texts)

    def add_whole(self, rows: list[tuple[str, int]]) -> None:
        """A request without a gateway; the tower makes its items."""
        self.num_whole += 1
        name = f"{self.name}-whole-{self.num_whole}"
        self._take_in(whole_request(name, rows, gap=1), "", name, 1, 1)
        self.has_news = True

    def _take_in(
        self, request: FakeRequest, gateway: str, request_id: str, attempt: int, num_texts: int
    ) -> Running:
        last = request.mm_features[-1].mm_position
        prompt_len = last.offset + last.length + num_texts
        prefix = min(self._prefix, prompt_len - 1)
        added = self.live[request.request_id] = Running(
            request=request,
            prompt_len=prompt_len,
            prefix=prefix,
            gateway=gateway,
            request_id=request_id,
            attempt=attempt,
        )
        self.waiting.append(request.request_id)
        self.consumer.on_request_added(request)
        return added

    @property
    def can_step(self) -> bool:
        """Has vLLM anything to do? Without news a step that moved nothing would move nothing again."""
        return self.is_up and (self.has_news or bool(self.in_flight))

    def step(self) -> None:
        """What came of the oldest step, if there are enough of them; then the next one."""
        self.has_news = False
        if not self.in_flight or len(self.in_flight) >= self._steps_in_flight:
            self._update()
        self._end_overdue()
        woken = [
            engine_request_id
            for engine_request_id in self.consumer.drain_inbox()
            if engine_request_id in self.parked
        ]
        if self.consumer.is_store_lost:
            raise EngineDiedError("the lease on the store is lost")
        woken = [each for each in woken if self.may_leave_parking(each)]
        for engine_request_id in woken:
            del self.parked[engine_request_id]
            self.consumer.on_unparked(engine_request_id, 0)
        self.waiting = woken + self.waiting
        windows = [
            window
            for engine_request_id in list(self.running)
            for window in self._schedule_running(self.live[engine_request_id])
        ]
        self.is_full = False
        windows += self._schedule_waiting()
        if self.preempts_late and windows:
            victim, self.preempts_late = windows[-1].engine_request_id, False
            self.preempt(victim)
            windows = [window for window in windows if window.engine_request_id != victim]
            self.encodes = [item for item in self.encodes if item in self.cached]  # vLLM takes them back
        freed, self.freed = self.freed, []
        step = self._run_worker(freed, self.consumer.take_loads(), windows)
        self.loads_in_flight.on_step_scheduled(step.loads)
        if windows:
            self.in_flight.append(step)
        elif self.in_flight:  # nothing to schedule: vLLM waits for an output
            self._update()
        if (
            (self.waiting and not self.is_full)
            or self.consumer._requests._to_wake
            or self.consumer._requests._failed
        ):
            self.has_news = True

    def preempt(self, engine_request_id: str) -> None:
        """vLLM needs its KV blocks."""
        each = self.live[engine_request_id]
        self.loads_in_flight.note_departure(each.request, self._scheduler)
        for place in list(each.inputs):
            self._free_input(each, place)
        was_partial = self.partial.end(engine_request_id)
        self.consumer.on_preempted(engine_request_id, keeps_deadline=was_partial)
        each.computed, each.is_done, each.is_wrong = 0, False, False
        each.epoch += 1
        self.running.remove(engine_request_id)
        self.free_blocks(engine_request_id)
        self.waiting.insert(0, engine_request_id)
        self.has_news = True

    def empty_cache(self) -> None:
        """Between two steps, scheduler and worker forget every item."""
        while self.in_flight:
            self._update()
        for each in self.live.values():
            each.inputs.clear()
        self.cached.clear()
        self.freed.clear()
        self.consumer.on_cache_emptied()
        for item in list(self.views):
            self._end_pin(self.views.pop(item))
        self.has_news = True

    def change_prefix(self, engine_request_id: str) -> None:
        """The KV cache has more of its prompt by now, or nothing any more."""
        each = self.live[engine_request_id]
        each.prefix = 0 if each.prefix else each.prompt_len - 1
        self.has_news = True

    def next_timer(self, *, with_upkeep: bool = True) -> float | None:
        return min(self.consumer._deadlines._by_request.values(), default=None)

    def run_due(self) -> None:
        """The alarm wakes the engine."""
        when = self.next_timer()
        if when is not None and when <= CLOCK.now:
            self.has_news = True

    # ---- vLLM's scheduler ------------------------------------------------------------------------
    @property
    def _scheduler(self) -> Any:
        """vLLM's, as far as `failed_loads` reads it. Without KV blocks."""
        pool = SimpleNamespace(blocks=[], null_block=SimpleNamespace(block_id=0))
        cache = SimpleNamespace(
            block_pool=pool, get_block_ids=lambda request_id: ([],), evict_blocks=lambda blocks: None
        )
        return SimpleNamespace(kv_cache_manager=cache, block_size=1, requests=self.live)

    def _update(self) -> None:
        """The worker's output of the oldest step. With none: of one that had nothing to compute."""
        step = self.in_flight.popleft() if self.in_flight else Step((), frozenset(), frozenset())
        output = SimpleNamespace(
            req_id_to_index={window.engine_request_id: index for index, window in enumerate(step.windows)},
            sampled_token_ids=[[0] for _ in step.windows],
            pooler_output=None,
            prompt_logprobs_dict={},
            prompt_token_id_logprobs_dict={},
        )
        if step.lost:
            undo_failed_loads(step.lost, self.consumer, self.loads_in_flight, self._scheduler, output)
        self.loads_in_flight.on_step_output(step.loads)
        for window, tokens in zip(step.windows, output.sampled_token_ids, strict=True):
            each = self.live.get(window.engine_request_id)
            if each is None or each.epoch != window.epoch:
                continue
            self.has_news = True
            self._free_computed(each)
            if tokens and window.start == window.end:
                assert not each.is_wrong, "answered from zeros"
                self._finish(window.engine_request_id)
                if not self._choices(each.request_id, each.attempt):
                    self._send(each, "answer")
            elif tokens and window.end >= each.prompt_len and not each.has_begun:
                for choice in self._choices(each.request_id, each.attempt):
                    choice.has_begun = True
                self._on_first_token(each)
        for engine_request_id in sorted(self.consumer.take_failed()):
            if engine_request_id in self.live:
                failed = self.live[engine_request_id]
                self._send(failed, "error")
                for each in self._choices(failed.request_id, failed.attempt):
                    self._finish(each.engine_request_id)

    def _free_computed(self, each: Running) -> None:
        """vLLM counts tokens as computed when it schedules them; what is in flight is the mixin's to know."""
        for place in sorted(each.inputs):
            item = each.request.mm_features[place].identifier
            if each.end_of(place) <= each.computed and not self.loads_in_flight.is_loading(item):
                self._free_input(each, place)
                self.consumer.on_item_computed(each.engine_request_id, place)

    def _end_overdue(self) -> None:
        for engine_request_id in self.consumer.take_overdue():
            if engine_request_id in self.live and (
                engine_request_id not in self.running or self.consumer.status(engine_request_id).waits
            ):
                self.consumer.fail_overdue(self.live[engine_request_id].request)

    def _on_first_token(self, each: Running) -> None:
        self._send(each, "first")

    def _send(self, each: Running, what: str, *more: Any) -> None:
        assert what == "error" or not each.is_wrong, "answered from zeros"
        if not each.gateway:
            return
        self._network.send((self.name, each.gateway, "http"), (what, each.request_id, each.attempt, *more))

    def _finish(self, engine_request_id: str) -> None:
        each = self.live.pop(engine_request_id)
        self.partial.end(engine_request_id)
        self.loads_in_flight.note_departure(each.request, self._scheduler)
        under_way = [window for step in self.in_flight for window in step.windows]
        starts = [window.start for window in under_way if window[:2] == (engine_request_id, each.epoch)]
        self.consumer.on_finished(each.request, min([each.computed, *starts]))
        for place in list(each.inputs):
            self._free_input(each, place)
        self.waiting = [other for other in self.waiting if other != engine_request_id]
        self.running = [other for other in self.running if other != engine_request_id]
        self.parked.pop(engine_request_id, None)
        self.free_blocks(engine_request_id)
        self.has_news = True

    def _schedule_running(self, each: Running) -> list[Window]:
        is_admitted = self.consumer.admit_request(each.request, each.computed)
        for place in each.inputs:
            assert each.request.mm_features[place].identifier in self.cached, "evicted under a running step"
        if not is_admitted or each.is_done:
            return []
        start = each.computed
        if start >= each.prompt_len:
            each.is_done = True
            return [Window(each.engine_request_id, each.epoch, start, start)]
        end, loads = self._plan(each, start)
        if end > start:
            self._allocate(each, loads)
            each.computed = end
        return [Window(each.engine_request_id, each.epoch, start, end)] if end > start else []

    def _schedule_waiting(self) -> list[Window]:
        windows: list[Window] = []
        for engine_request_id in list(self.waiting):
            each = self.live[engine_request_id]
            is_admitted = self.consumer.admit_request(each.request, each.prefix)
            if is_admitted and self.consumer.status(engine_request_id).is_partial:
                is_admitted = self.may_begin_in_part(each)
            if not is_admitted:
                if not self.consumer.status(engine_request_id).has_failed:
                    self.waiting.remove(engine_request_id)
                    self.parked[engine_request_id] = None
                    self.consumer.on_parked(engine_request_id, 0)
                continue
            if not self.make_room(each):
                self.is_full = True
                for place in list(each.inputs):
                    self._free_input(each, place)
                break
            end, loads = self._plan(each, each.prefix)
            if self.consumer.status(engine_request_id).is_partial:
                self.partial.begin(engine_request_id, each.prompt_len)
            assert end > each.prefix, "admitted, and cannot move"
            self._allocate(each, loads)
            self.waiting.remove(engine_request_id)
            self.running.append(engine_request_id)
            self.take_blocks(each)
            windows.append(Window(engine_request_id, each.epoch, each.prefix, end))
            each.computed = end
        return windows

    # ---- vLLM's worker ---------------------------------------------------------------------------
    def _run_worker(self, freed: list[str], loads: list[Any], windows: list[Window]) -> Step:
        for item in freed:
            self._end_pin(self.views.pop(item, None))
        for item in self.encodes:
            self._end_pin(self.views.get(item))  # what it replaces
            self.views[item] = OWN
        self.encodes.clear()
        lost: set[str] = set()
        for order in loads:
            pin = self.store.core.leases.find_pin(order.pin_id)
            is_pinned = pin is not None and pin.entry.mm_hash == order.mm_hash
            assert is_pinned or not self.engine.is_connected, "an item that is not pinned is scheduled"
            assert self.views.get(order.mm_hash, OWN) == OWN, "loaded twice"
            self.views[order.mm_hash] = order.pin_id
            if self.loses_load:
                self.loses_load = False
                lost.add(order.mm_hash)
                self.views[order.mm_hash] = None
                self._end_pin(order.pin_id)
        for engine_request_id, _, start, end in windows:
            self.num_scheduled += 1
            each = self.live[engine_request_id]
            for _, item, _, reads in each.places_in(start, end):
                assert not reads or item in self.views, "the step reads an item that is not there"
                each.is_wrong |= reads and self.views[item] is None
        return Step(tuple(windows), frozenset(order.mm_hash for order in loads), frozenset(lost))

    def _end_pin(self, pin_id: int | None) -> None:
        if pin_id:
            self.worker.submit(Unpin(seq=0, pin_id=pin_id))
