"""A model of everything around the consumer: cache store, encoders, gateway, vLLM's scheduler and worker.

Each acts only when a test says so, in any order. Messages are delivered in any order too, except that a
session's end comes last. The models state what must never happen as assertions.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from support.fake_engine import (
    INSTANCE,
    FakeRequest,
    fake_request,
    metadata,
    mm_hash,
    pinned,
    sealed,
    watching,
    whole_request,
    writer_lost,
)
from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.protocol.messages import EncodeNeeded, EncoderCacheMetadata, ItemAck, Message
from triptych_common.protocol.store import EntrySealed, Pinned, StoreFailure, WriterLost
from triptych_vllm_connector.consumer import Consumer
from triptych_vllm_connector.inbox import Heard, PinReply, StoreLost
from triptych_vllm_connector.items import ItemState, LoadOrder
from triptych_vllm_connector.preallocator import make_preallocator
from triptych_vllm_connector.tower import Tower

ROWS = {mm_hash(index): rows for index, rows in enumerate((2, 3, 5, 7))}  # the items there are
HASHES = sorted(ROWS)


class StoreModel:
    """`PinLink`, and the store behind it: commands wait for `run_next`, answers for delivery."""

    def __init__(self) -> None:
        self.commands: deque[tuple[str, str | int]] = deque()
        self.to_engine: list[Heard] = []
        self.sealed: set[str] = set()
        self.writing: set[str] = set()
        self.watches: set[str] = set()
        self.pins: dict[int, str] = {}
        self.num_pins = 0
        self.refuses_next = False
        self.is_lost = False

    # ---- PinLink ----
    def pin_or_watch(self, mm_hash: str) -> None:
        if self.is_lost:
            self.to_engine.append(PinReply(mm_hash, StoreUnavailableError("gone")))
        else:
            self.commands.append(("pin_or_watch", mm_hash))

    def unpin(self, pin_id: int) -> None:
        self.commands.append(("unpin", pin_id))

    def unwatch(self, mm_hash: str) -> None:
        self.commands.append(("unwatch", mm_hash))

    # ---- the store ----
    def run_next(self) -> None:
        command, argument = self.commands.popleft()
        if self.is_lost:
            return
        match command, argument:
            case "pin_or_watch", str():
                self._pin_or_watch(argument)
            case "unwatch", str():
                self.watches.discard(argument)
            case "unpin", int():
                self.end_pin(argument)

    def end_pin(self, pin_id: int) -> None:
        if not self.is_lost:
            assert pin_id in self.pins, "a pin ended twice"
            del self.pins[pin_id]

    def seal(self, identifier: str) -> None:
        self.writing.discard(identifier)
        self.sealed.add(identifier)
        if identifier in self.watches:
            self.watches.discard(identifier)
            self.to_engine.append(sealed(identifier, self._new_pin(identifier)))

    def lose_writer(self, identifier: str) -> None:
        self.writing.discard(identifier)
        if identifier in self.watches:
            self.to_engine.append(writer_lost(identifier))

    def evict(self, identifier: str) -> None:
        if identifier not in self.pins.values():
            self.sealed.discard(identifier)

    def lose(self) -> None:
        """The session ends; what is under way is answered before."""
        while self.commands:
            command, argument = self.commands.popleft()
            if command == "pin_or_watch":
                self.to_engine.append(PinReply(str(argument), StoreUnavailableError("gone")))
        self.to_engine.append(StoreLost())
        self.is_lost = True
        self.pins.clear()
        self.watches.clear()

    def _pin_or_watch(self, identifier: str) -> None:
        if self.refuses_next:
            self.refuses_next = False
            reply = PinReply(identifier, StoreFailure(seq=1, code="internal", detail="refused"))
        elif identifier in self.sealed:
            reply = PinReply(identifier, pinned(identifier, self._new_pin(identifier)))
        else:
            self.watches.add(identifier)
            reply = PinReply(identifier, watching(identifier, writing=identifier in self.writing))
        self.to_engine.append(reply)

    def _new_pin(self, identifier: str) -> int:
        self.num_pins += 1
        self.pins[self.num_pins] = identifier
        return self.num_pins


class TalkModel:
    """`TalkLink`: the acks that encoders got, and what is under way to the gateway."""

    def __init__(self) -> None:
        self.acks: set[tuple[str, str, int]] = set()  # (job, wire id, place)
        self.needs: list[EncodeNeeded] = []

    def to_encoder(self, encoder: str, message: Message, traceparent: str | None) -> None:
        if isinstance(message, ItemAck):
            self.acks.add((message.job_id, message.request_id, message.item_index))

    def to_gateway(self, gateway: str, message: Message, traceparent: str | None) -> None:
        assert isinstance(message, EncodeNeeded)
        self.needs.append(message)


@dataclass
class Running:
    """One request in vLLM's hands."""

    request: FakeRequest
    prompt_len: int
    prefix: int = 0  # tokens that the KV prefix cache covers now
    computed: int = 0  # tokens scheduled so far; the worker may be a step behind
    epoch: int = 0  # times preempted
    inputs: set[int] = field(default_factory=set)  # places whose item it refers to in the encoder cache

    @property
    def rid(self) -> str:
        return self.request.request_id

    @property
    def wire_id(self) -> str:
        params = self.request.ec_transfer_params
        return self.request.request_id if params is None else str(params["request_id"])

    def end_of(self, place: int) -> int:
        position = self.request.mm_features[place].mm_position
        return position.offset + position.length

    def places_in(self, start: int, end: int) -> Iterator[tuple[int, str, int, bool]]:
        """(place, item, first token, does the window touch embeddings?) of placeholders in [start, end)."""
        for place, feature in enumerate(self.request.mm_features):
            position = feature.mm_position
            if position.offset < end and start < position.offset + position.length:
                first = position.offset + 1  # the placeholder begins and ends with a mark
                touches = first < end and start < first + position.num_embeds
                yield place, feature.identifier, position.offset, touches


Window = tuple[str, int, int, int]  # (request id, epoch, first token, end)


class World:
    """See the module docstring. `kv_tokens`: the KV cache's size; a request runs if it fits whole."""

    def __init__(self, strategy: str, budget: int, kv_tokens: int, max_in_flight: int) -> None:
        self.store = StoreModel()
        self.talk = TalkModel()
        self.budget = budget if strategy == "sync" else None
        self.preallocator = make_preallocator(strategy, budget)
        encodes = Tower(lambda modality: {"image_grid_thw"}).encodes
        self.consumer = Consumer(
            INSTANCE, self.store, self.talk, self.preallocator, lambda: 0, encodes=encodes
        )
        self.consumer.bind(
            self._evict, lambda rid, place: rid in self.live and place in self.live[rid].inputs
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
        wire_id: str | None,
        is_ordered: bool,
        prefix: int = 0,
        is_local: bool = False,
    ) -> None:
        self.num_requests += 1
        gateway = "gateway-0" if has_gateway else None
        rows, rid = [(item, ROWS[item]) for item in items], f"r{self.num_requests}"
        if is_local:
            request = whole_request(rid, rows, gap=1)
        else:
            request = fake_request(rid, rows, wire_id=wire_id, gateway=gateway, gap=1)
        last = request.mm_features[-1].mm_position
        prompt_len = last.offset + last.length + 2
        added = Running(request, prompt_len, min(prefix, prompt_len - 1))
        self.live[added.rid] = added
        self.waiting.append(added.rid)
        if is_ordered:
            self.orders |= {(added.wire_id, item) for item in items}

    def gateway_hears(self, index: int) -> None:
        message = self.talk.needs.pop(index)
        if message.request_id in {each.wire_id for each in self.live.values()}:
            self.orders.add((message.request_id, message.mm_hash))

    def encode(self, wire_id: str, item: str) -> None:
        """An encoder takes an order: it reserves, and tells who waits. Orders of the dead are dropped."""
        self.orders.discard((wire_id, item))
        requesters = {
            (each.wire_id, place)
            for each in self.live.values()
            for place, feature in enumerate(each.request.mm_features)
            if feature.identifier == item and each.wire_id == wire_id
        }
        if not requesters:
            return
        if item not in self.store.sealed:
            self.store.writing.add(item)
        self.num_jobs += 1
        job_id = f"job-{self.num_jobs}"
        self.expected_acks |= {(job_id, *requester) for requester in requesters}
        self.store.to_engine.append(metadata(item, *sorted(requesters), job_id=job_id))

    # ---- what the consumer hears -----------------------------------------------------------------
    def hear(self, index: int) -> None:
        self.consumer.post(self.store.to_engine.pop(index))

    def lose_store(self) -> None:
        self.store.lose()
        while self.store.to_engine:
            self.hear(0)

    # ---- what operators and gateways that hang do -------------------------------------------------
    def reset_encoder_cache(self) -> None:
        """Between two steps: scheduler and worker forget every item."""
        while self.in_flight:
            self.update()
        for each in self.live.values():
            each.inputs.clear()
        self.cached.clear()
        self.freed.clear()
        self.consumer.views_forgotten()
        while self.worker:
            self._drop_view(self.worker.popitem()[1])

    def end_overdue(self, rid: str) -> None:
        """The time of a request that does not run is up."""
        self.consumer.overdue(self.live[rid].request)

    # ---- vLLM's scheduler ------------------------------------------------------------------------
    def schedule(self, chunk: int, preempts: str | None = None, kv_fails: bool = False) -> None:
        """One step, of at most `chunk` tokens per request."""
        while len(self.in_flight) >= self.max_in_flight:
            self.update()
        self._resume()
        windows: list[Window] = []
        for rid in list(self.running):
            windows += self._schedule_running(self.live[rid], chunk)
        deferred: list[str] = []
        if preempts is None:
            windows += self._schedule_waiting(chunk, kv_fails, deferred)
        else:  # it was scheduled in this very pass, perhaps
            self._preempt(self.live[preempts])
            windows = [window for window in windows if window[0] != preempts]
            self.encodes = [item for item in self.encodes if item in self.cached]  # vLLM takes them back
        for rid in deferred:
            if not self.consumer.has_failed(rid):
                self.waiting.remove(rid)
                self.parked.add(rid)
                self.consumer.parked(rid, 0)
        freed, self.freed = [item for item in self.freed if item not in self.cached], []
        encodes, self.encodes = self.encodes, []
        self._run_worker(freed, self.consumer.take_loads(), encodes, windows)
        self.in_flight.append(windows)

    def update(self) -> None:
        """The worker's answer to the oldest step."""
        for rid, epoch, _, _ in self.in_flight.popleft():
            each = self.live.get(rid)
            if each is None or each.epoch != epoch:
                continue
            for place in sorted(each.inputs):
                if each.end_of(place) <= each.computed:
                    self._free_input(each, place)
                    self.consumer.computed(rid, place)
        for rid in self.consumer.take_failed():
            if rid in self.live:
                self.finish(rid)

    def finish(self, rid: str) -> None:
        """Answered, aborted or failed."""
        each = self.live.pop(rid)
        self.consumer.finished(each.request, each.computed)
        for place in list(each.inputs):
            self._free_input(each, place)
        self.waiting = [other for other in self.waiting if other != rid]
        self.running = [other for other in self.running if other != rid]
        self.parked.discard(rid)

    @property
    def answered(self) -> list[str]:
        """Requests whose prompt is computed, with no step of theirs under way."""
        busy = {window[0] for windows in self.in_flight for window in windows}
        return [r for r in self.running if self.live[r].computed >= self.live[r].prompt_len and r not in busy]

    def _resume(self) -> None:
        woken = [rid for rid in self.consumer.drain() if rid in self.parked]
        for rid in woken:
            self.parked.discard(rid)
            self.consumer.unparked(rid, 0)
        self.waiting = woken + self.waiting

    def _schedule_running(self, each: Running, chunk: int) -> list[Window]:
        is_admitted = self.consumer.admit(each.request, each.computed)
        for place in each.inputs:  # steps under way may read it, vLLM says when they do not
            assert each.request.mm_features[place].identifier in self.cached, "evicted under a running step"
        if not is_admitted:
            return []
        start = each.computed
        if start >= each.prompt_len:
            each.computed += 1  # decode
        else:
            end, loads = self._plan(each, start, min(start + chunk, each.prompt_len))
            self._allocate(each, loads)
            each.computed = end
        return [(each.rid, each.epoch, start, each.computed)]

    def _schedule_waiting(self, chunk: int, kv_fails: bool, deferred: list[str]) -> list[Window]:
        windows = []
        for rid in list(self.waiting):
            each = self.live[rid]
            if not self.consumer.admit(each.request, each.prefix):
                deferred.append(rid)
                continue
            end, loads = self._plan(each, each.prefix, min(each.prefix + chunk, each.prompt_len))
            taken = sum(self.live[other].prompt_len for other in self.running)
            if kv_fails or taken + each.prompt_len > self.kv_tokens:
                for place in list(each.inputs):
                    self._free_input(each, place)
                break
            self._allocate(each, loads)
            self.waiting.remove(rid)
            self.running.append(rid)
            windows.append((rid, each.epoch, each.prefix, end))
            each.computed = end
        return windows

    def _plan(self, each: Running, start: int, end: int) -> tuple[int, list[tuple[int, str]]]:
        """`_try_schedule_encoder_inputs`: clips the step at the first item that is not here."""
        loads: list[tuple[int, str]] = []
        for place, item, first, touches in each.places_in(start, end):
            if item in [load for _, load in loads]:
                loads.append((place, item))
            elif item in self.cached:
                self._refer(each, place)
            elif self.consumer.is_local(each.rid):
                if not self.consumer.may_encode(each.rid, place):
                    end = max(start, first)
                    break
                if touches:
                    loads.append((place, item))
            elif not self.consumer.must_load(item):
                assert not self.consumer.is_resident(item), "the worker has it, vLLM does not know"
                end = max(start, first)
                break
            elif touches:
                loads.append((place, item))
        assert end > start, "admitted, and cannot move"
        return end, loads

    def _allocate(self, each: Running, loads: list[tuple[int, str]]) -> None:
        for place, item in loads:
            if item not in self.cached:
                self.cached[item] = set()
                self.consumer.load(each.rid, item)
                if self.consumer.is_local(each.rid):
                    self.encodes.append(item)
            self._refer(each, place)

    def _refer(self, each: Running, place: int) -> None:
        each.inputs.add(place)
        self.cached[each.request.mm_features[place].identifier].add(each.rid)

    def _free_input(self, each: Running, place: int) -> None:
        item = each.request.mm_features[place].identifier
        each.inputs.discard(place)
        if item in self.cached and not any(
            each.request.mm_features[other].identifier == item for other in each.inputs
        ):
            self.cached[item].discard(each.rid)
            if not self.cached[item] and not self.consumer.is_resident(item):
                self._evict(item)

    def _preempt(self, each: Running) -> None:
        for place in list(each.inputs):
            self._free_input(each, place)
        self.consumer.preempted(each.rid)
        each.computed = 0
        each.epoch += 1
        self.running.remove(each.rid)
        self.waiting.insert(0, each.rid)

    def _evict(self, item: str) -> None:
        if any(map(self.consumer.is_local, self.cached.get(item, ()))):
            return  # it goes with its last reference
        if self.cached.pop(item, None) is not None:
            self.freed.append(item)

    # ---- vLLM's worker ---------------------------------------------------------------------------
    def _run_worker(
        self, freed: list[str], loads: list[LoadOrder], encodes: list[str], windows: list[Window]
    ) -> None:
        for item in freed:
            if item in self.worker:
                self._drop_view(self.worker.pop(item))
        for item in encodes:
            self._drop_view(self.worker.get(item))  # what it replaces
            self.worker[item] = None
        for order in loads:
            assert self.store.is_lost or self.store.pins.get(order.pin_id) == order.mm_hash, "not pinned"
            self._drop_view(self.worker.get(order.mm_hash))  # evicted and loaded in one pass: replaced
            self.worker[order.mm_hash] = order.pin_id
        for rid, _, start, end in windows:
            for _, item, _, touches in self.live[rid].places_in(start, end):
                assert not touches or item in self.worker, "the step reads an item that is not there"

    def _drop_view(self, pin_id: int | None) -> None:
        if pin_id is not None:
            self.store.end_pin(pin_id)

    # ---- what always holds -----------------------------------------------------------------------
    def check_space(self) -> None:
        held = {item for item in HASHES if self.consumer._items.holders(item)}
        for rid in self.live:
            admission = self.consumer._requests.get(rid)
            if admission is not None and admission.is_local:
                held |= {admission.features[place].mm_hash for place in admission.granted}
        assert self.preallocator.num_embeds_used == sum(ROWS[item] for item in held)
        assert self.budget is None or self.preallocator.num_embeds_used <= self.budget

    def check_pins(self) -> None:
        """Every pin has one owner: a message under way, the item table, a load order, or the worker."""
        if self.store.is_lost:
            return
        owners = [pin for heard in self._heard_not_handled() if (pin := _pin_of(heard)) is not None]
        owners += [int(argument) for command, argument in self.store.commands if command == "unpin"]
        owners += [
            item.pin_id
            for item in self.consumer._items._items.values()
            if item.state is ItemState.PINNED and item.pin_id is not None
        ]
        owners += [order.pin_id for order in self.consumer._holdings._loads]
        owners += [pin for pin in self.worker.values() if pin is not None]
        assert sorted(owners) == sorted(self.store.pins)

    def check_nobody_is_lost(self) -> None:
        """Who is parked waits for space, or for an item that can still come, or is about to be woken."""
        woken = set(self.consumer._requests._to_wake)
        for rid in self.parked - woken:
            admission = self.consumer._requests[rid]
            items = {admission.features[place].mm_hash for place in admission.granted}
            assert not admission.is_local or self.preallocator.is_pending(rid), "parked for nothing"
            waits = [
                item
                for item in items
                if not admission.is_local and self.consumer._items.state(item) is ItemState.WATCHING
            ]
            assert waits or self.preallocator.is_pending(rid), "parked for nothing"
            for item in waits:
                assert self._can_come(item), "parked for an item that nobody makes"

    def _can_come(self, item: str) -> bool:
        about_it = [heard for heard in self._heard_not_handled() if _item_of(heard) in (item, "all")]
        is_asked = ("pin_or_watch", item) in self.store.commands
        is_watched = item in self.store.watches
        is_made = item in self.store.writing or any(order[1] == item for order in self._live_orders())
        is_wanted = any(message.mm_hash == item for message in self._live_needs())
        return bool(about_it) or is_asked or (is_watched and (is_made or is_wanted))

    def _heard_not_handled(self) -> list[Heard]:
        return [*self.store.to_engine, *self.consumer._inbox._heard]

    def _live_orders(self) -> set[tuple[str, str]]:
        wires = {each.wire_id for each in self.live.values()}
        return {order for order in self.orders if order[0] in wires}

    def _live_needs(self) -> list[EncodeNeeded]:
        wires = {each.wire_id for each in self.live.values()}
        return [message for message in self.talk.needs if message.request_id in wires]

    # ---- the end ---------------------------------------------------------------------------------
    def run_to_the_end(self) -> None:
        """No more faults: everybody is served."""
        self.store.refuses_next = False
        for _ in range(20 + 30 * len(self.live)):
            self._settle()
            self.schedule(100)
            while self.in_flight:
                self.update()
            for rid in self.answered:
                self.finish(rid)
            if not self.live:
                break
        assert not self.live, f"never served: {sorted(self.live)}"
        self._settle()
        self.consumer.drain()
        self.schedule(1)  # vLLM steps once more: the worker drops its views
        self._settle()

    def _settle(self) -> None:
        """Store, encoders and gateway do all that is to do."""
        while (
            self.talk.needs
            or self.orders
            or self.store.writing
            or self.store.commands
            or self.store.to_engine
        ):
            while self.talk.needs:
                self.gateway_hears(0)
            for wire_id, item in sorted(self.orders):
                self.encode(wire_id, item)
            for item in sorted(self.store.writing):
                self.store.seal(item)
            while self.store.commands:
                self.store.run_next()
            while self.store.to_engine:
                self.hear(0)


def _item_of(heard: Heard) -> str | None:
    match heard:
        case PinReply() | WriterLost():
            return heard.mm_hash
        case EntrySealed():
            return heard.descriptor.mm_hash
        case StoreLost():
            return "all"
        case EncoderCacheMetadata():
            return None


def _pin_of(heard: Heard) -> int | None:
    match heard:
        case EntrySealed():
            return heard.pin_id
        case PinReply(reply=Pinned() as reply):
            return reply.pin_id
        case _:
            return None
