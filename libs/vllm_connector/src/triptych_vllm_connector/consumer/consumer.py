"""prefill_decode's side of the handover, inside EngineCore: decide, pin, wait, wake, release.

    scheduler, connector ──▶ Consumer ──▶ request_table  admissions; which are woken, which have failed
                                 │   ├──▶ item_grants    space for items, and what the store's answers mean
    store, bus ──▶ Inbox ──▶ drain   ├──▶ item_pins      what is watched, pinned, resident
                                     ├──▶ item_replies   decisions and acks to encoders, orders to gateways
                                     └──▶ deadlines      until when requests may wait

Everything here runs on EngineCore's own thread, except `Inbox.post_event` and `Inbox.wake_engine`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from triptych_common.domain.errors import StoreError
from triptych_common.protocol.messages import EncoderCacheMetadata, Outcome
from triptych_common.protocol.store import EntrySealed, StoreReply, WriterLost
from triptych_vllm_connector import engine_counters
from triptych_vllm_connector.consumer.admission import NOT_ASKED, Admission
from triptych_vllm_connector.consumer.deadlines import Deadlines
from triptych_vllm_connector.consumer.item_grants import ItemGrants
from triptych_vllm_connector.consumer.item_pins import EngineItemState, ItemPins
from triptych_vllm_connector.consumer.item_replies import ItemReplies
from triptych_vllm_connector.consumer.local_encode import encodes_no_request
from triptych_vllm_connector.consumer.overlap import NO_OVERLAP, OverlapPolicy, Readiness
from triptych_vllm_connector.consumer.ports import EncoderCache, MessageSender, PinLink
from triptych_vllm_connector.consumer.preallocator import Preallocator
from triptych_vllm_connector.consumer.request_table import RequestTable
from triptych_vllm_connector.engine_counters import Changes, EngineCounters
from triptych_vllm_connector.step_orders import LoadedTensor, LoadOrder


class StoreLost:
    """The store session ended, and with it every pin that no worker holds."""


class BusChanged:
    """A different Redis answers, so messages already sent may be lost."""


@dataclass
class PinReply:
    mm_hash: str
    reply: StoreReply | StoreError


InboxEvent = PinReply | EntrySealed | WriterLost | EncoderCacheMetadata | StoreLost | BusChanged


class Inbox:
    """Lock-free queue of events for the engine's thread; any thread may post.

    It exists before the consumer, because a session may be lost as soon as it is open.
    """

    def __init__(self) -> None:
        self._events: deque[InboxEvent] = deque()
        self._wake_engine: Callable[[], None] = lambda: None

    def attach_waker(self, wake_engine: Callable[[], None]) -> None:
        """Set `wake_engine`, which ends the engine's wait for input; vLLM creates it when its loop starts."""
        self._wake_engine = wake_engine

    def post_event(self, event: InboxEvent) -> None:
        """Queue an event for the engine's thread, and wake it."""
        self._events.append(event)
        self.wake_engine()

    def wake_engine(self) -> None:
        self._wake_engine()

    def take_events(self) -> Iterator[InboxEvent]:
        """Yield events until the queue is empty, including those posted meanwhile."""
        while self._events:
            yield self._events.popleft()


class Consumer:
    """The scheduler's and connector's interface to the handover; `engine_request_id` is vLLM's `request_id`.

    `now_ns` is wall-clock time for spans, `now` monotonic seconds. `set_alarm(when)` wakes the engine then.
    `encodes_request(request)` is true for requests that this instance encodes itself: they need only space.
    """

    def __init__(
        self,
        instance: str,
        link: PinLink,
        sender: MessageSender,
        preallocator: Preallocator,
        cache: EncoderCache,
        inbox: Inbox,
        *,
        set_alarm: Callable[[float], None] = lambda when: None,
        encodes_request: Callable[[Any], bool] = encodes_no_request,
        overlap: OverlapPolicy = NO_OVERLAP,
        now_ns: Callable[[], int] = time.time_ns,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = inbox
        self._preallocator = preallocator
        self._counters = EngineCounters()
        self._requests = RequestTable(instance, encodes_request, now_ns)
        self._deadlines = Deadlines(now, set_alarm)
        self._pins = ItemPins(link, cache)
        self._replies = ItemReplies(instance, sender, self._requests)
        self._grants = ItemGrants(self._requests, self._pins, preallocator, self._replies, cache, overlap)
        self.is_store_lost = False  # the lease is gone for good: views may be overwritten

    # ---- scheduling ------------------------------------------------------------------------------
    def admit_request(self, request: Any, num_computed_tokens: int) -> bool:
        """True if `request` may be scheduled with `num_computed_tokens` in the KV cache.

        Decides about its items as well: covered ones are declined, the others preallocated and pinned.
        """
        admission = self._requests.get(request.request_id)
        if admission is None:
            admission = self._requests.open_request(request)
            self._counters.count(engine_counters.LOCAL_ENCODES, int(admission.is_local))
            if not admission.has_failed:
                for feature in admission.covered_by(num_computed_tokens):
                    self._replies.skip_item(admission, feature, "prefix_cached")
        if admission.has_failed:
            return False
        if admission.is_waiting and admission.asked_at == num_computed_tokens:
            return False  # stalled: vLLM asks in every step, and what changes the answer wakes the request
        if not admission.asked and num_computed_tokens >= admission.last_end:
            readiness = Readiness.WHOLE
        elif self._grants.ask_space(admission, admission.needs_after(num_computed_tokens)):
            readiness = self._grants.readiness(admission, num_computed_tokens)
        else:
            readiness = Readiness.WAITS
        self._requests.note_answer(admission, readiness, num_computed_tokens)
        return readiness is not Readiness.WAITS

    def use_overlap(self, overlap: OverlapPolicy) -> None:
        """Set how far requests may run before all their items are here; called before the first request."""
        self._grants.overlap = overlap

    def status(self, engine_request_id: str) -> Admission:
        """Admission of the request, to be read only; `NOT_ASKED` before the scheduler asks about it."""
        return self._requests.get(engine_request_id) or NOT_ASKED

    def readiness_now(self, engine_request_id: str) -> Readiness:
        """Extent to which the request could run if it were asked about again."""
        admission = self.status(engine_request_id)
        return self._grants.readiness(admission, admission.asked_at)

    def num_missing(self, engine_request_id: str) -> int:
        """Number of items that the request has asked space for and that are not here."""
        return self._grants.num_missing(self.status(engine_request_id))

    def item_state(self, mm_hash: str) -> EngineItemState | None:
        """State of the item: the worker can load a PINNED one and holds a view of a RESIDENT one."""
        return self._pins.state_of(mm_hash)

    def begin_whole(self, engine_request_id: str) -> None:
        """Make the request wait for all granted items, since there is no room to begin in part."""
        admission = self._requests.get(engine_request_id)
        if admission is not None:
            self._requests.begin_whole(admission)
            self._requests.note_answer(admission, Readiness.WAITS, admission.asked_at)

    def load_item(self, engine_request_id: str, mm_hash: str) -> None:
        """Order the worker to load the item in this step; vLLM has allocated its cache space."""
        admission = self.status(engine_request_id)
        if not admission.is_local:
            self._pins.order_load(mm_hash, admission.traceparent)
        self._preallocator.finalize_allocation(mm_hash)

    def on_loaded(self, tensors: Iterable[LoadedTensor]) -> None:
        for each in tensors:
            self._counters.count(engine_counters.HANDOVER_BYTES, each.num_bytes, each.transport)
            self._counters.observe(engine_counters.HANDOVER_S, each.seconds, each.transport)

    def take_loads(self) -> list[LoadOrder]:
        return self._pins.take_load_orders()

    def take_starts(self) -> tuple[list[LoadOrder], list[str]]:
        """Pinned items that workers may copy ahead, and earlier ones that no step will load."""
        return self._pins.take_starts()

    def on_loads_failed(self, mm_hashes: Iterable[str]) -> dict[str, int]:
        """Fail the requests that hold these items, which the worker replaced by zeros.

        Returns:
            Those requests, with the index of the first token whose key and value may be wrong.
        """
        first_tokens: dict[str, int] = {}
        mm_hashes = tuple(mm_hashes)
        self._counters.count(engine_counters.FAILED_LOADS, len(mm_hashes))
        for mm_hash in mm_hashes:
            for engine_request_id in self._pins.requests_of(mm_hash):
                admission = self._requests[engine_request_id]
                start = admission.places_of(mm_hash)[0].start
                first_tokens[engine_request_id] = min(start, first_tokens.get(engine_request_id, start))
                self._grants.fail_admission(admission, "the item could not be read")
        return first_tokens

    def fail_request(self, engine_request_id: str, why: str) -> None:
        admission = self._requests.get(engine_request_id)
        if admission is not None:
            self._grants.fail_admission(admission, why)

    # ---- the end of items and requests -----------------------------------------------------------
    def on_item_computed(self, engine_request_id: str, item_index: int) -> None:
        """Release the place: its placeholder is in the request's KV cache."""
        admission = self._requests.get(engine_request_id)
        if admission is None or admission.has_failed:
            return
        self._replies.ack_item(admission, admission.features[item_index], Outcome.INJECTED)
        self._grants.give_back_place(admission, item_index)

    def on_preempted(self, engine_request_id: str, *, keeps_deadline: bool = False) -> None:
        """Give everything back, because the request starts again; `admit_request` will ask anew.

        Args:
            keeps_deadline: it has begun in part, and waits for its first token as before.
        """
        admission = self._requests.get(engine_request_id)
        if admission is not None:
            self._requests.note_preempted(admission)
            self._grants.give_back_request(admission)
            if not (keeps_deadline and self._deadlines.has_deadline(engine_request_id)):
                self._renew_wait(admission)

    def on_cache_emptied(self) -> None:
        """Ask the store anew for the items that vLLM's encoder cache held.

        A step in flight may read an item: its output will not report the item's end (`on_item_computed`).
        """
        self._pins.forget_views()
        self._grants.wake_with_unused_places()

    def on_finished(self, request: Any, num_computed_tokens: int) -> None:
        """Acknowledge every item of an ended request, and give everything back.

        `request` may never have been admitted; its encoders wait for acks all the same.
        """
        admission = self._requests.close_request(request)
        self._deadlines.end_wait(request.request_id)
        if admission is None:
            admission, num_computed_tokens = self._requests.admission_of_unopened(request), 0
        self._observe_wait(admission)
        for feature in admission.features:
            if admission.has_failed:
                self._replies.ack_item(admission, feature, Outcome.FAILED)
            elif feature.end <= num_computed_tokens:
                self._replies.ack_item(admission, feature, Outcome.INJECTED)
            else:
                self._replies.skip_item(admission, feature, "request_gone")
        self._grants.give_back_request(admission)

    # ---- waiting and waking ----------------------------------------------------------------------
    def on_request_added(self, request: Any) -> None:
        remaining_s = self._requests.remaining_s(request)
        if remaining_s is not None:
            self._deadlines.start_wait(request.request_id, remaining_s)

    def take_overdue(self) -> list[str]:
        """Requests past their deadline, once each; the scheduler knows which of them wait."""
        return self._deadlines.take_passed()

    def fail_overdue(self, request: Any) -> None:
        """End a waiting request whose deadline has passed with an error."""
        admission = self._requests.get(request.request_id) or self._requests.open_request(request)
        self._grants.fail_admission(admission, "its time is up")

    def on_parked(self, engine_request_id: str, step: int) -> None:
        admission = self._requests.get(engine_request_id)
        if admission is None or admission.parked_ns is not None:
            return
        self._requests.note_parked(admission, step, self._grants.num_missing(admission))
        if not self._deadlines.has_deadline(engine_request_id):
            self._renew_wait(admission)

    def on_unparked(self, engine_request_id: str, step: int) -> None:
        admission = self._requests.get(engine_request_id)
        if admission is not None:
            self._observe_wait(admission)
            self._requests.note_unparked(admission, step)

    def attach_waker(self, wake_engine: Callable[[], None]) -> None:
        """Set `wake_engine`, which ends the engine's wait for input; called from other threads."""
        self._inbox.attach_waker(wake_engine)

    def drain_inbox(self) -> list[str]:
        """Handle queued events; returns the requests to take out of parking."""
        for event in self._inbox.take_events():
            match event:
                case PinReply():
                    self._grants.on_pin_reply(event.mm_hash, event.reply)
                case EntrySealed():
                    self._grants.on_pinned(event.descriptor.mm_hash, event)
                case WriterLost():
                    self._grants.on_writer_lost(event.mm_hash)
                case EncoderCacheMetadata():
                    self._replies.on_metadata(event)
                case StoreLost():
                    self.is_store_lost = True
                    self._grants.on_store_lost()
                case BusChanged():
                    self._pins.ask_for_ordered()
        return self._requests.take_to_wake()

    def take_failed(self) -> set[str]:
        """Requests whose items cannot come any more; vLLM ends them with an error."""
        return self._requests.take_failed_ids()

    # ---- what is counted -------------------------------------------------------------------------
    def on_stalled(self) -> None:
        """Count a running request that now waits for an item."""
        self._counters.count(engine_counters.STALLS)

    def note_waiting(self, num_parked: int, num_stalled: int) -> None:
        self._counters.set_gauge(engine_counters.PARKED, num_parked)
        self._counters.set_gauge(engine_counters.STALLED, num_stalled)

    def take_changes(self) -> Changes:
        """Metric changes since the last call, for the host."""
        counters, preallocator = self._counters, self._preallocator
        counters.count_up_to(engine_counters.PREALLOCATIONS, preallocator.num_granted, "granted")
        counters.count_up_to(engine_counters.PREALLOCATIONS, preallocator.num_queued, "queued")
        counters.set_gauge(engine_counters.PENDING, preallocator.num_pending)
        counters.set_gauge(engine_counters.BUDGET_USED, preallocator.num_embeds_used)
        if preallocator.budget_embeds is not None:
            counters.set_gauge(engine_counters.BUDGET, preallocator.budget_embeds)
        return counters.take()

    def _observe_wait(self, admission: Admission) -> None:
        if (waited_s := self._requests.waited_s(admission)) is not None:
            self._counters.observe(engine_counters.WAIT_S, waited_s)

    def counts(self) -> dict[str, int]:
        """Numbers of held objects, all 0 when idle; for tests."""
        return {
            "requests": len(self._requests),
            "watching": self._pins.count_items(EngineItemState.WATCHING),
            "pinned": self._pins.count_items(EngineItemState.PINNED),
            "resident": self._pins.count_items(EngineItemState.RESIDENT),
            "pending": self._preallocator.num_pending,
            "preallocated_embeds": self._preallocator.num_embeds_used,
        }

    def _renew_wait(self, admission: Admission) -> None:
        """Renew the deadline of a request that waits again, if a gateway sent it."""
        if admission.gateway is not None:
            self._deadlines.renew_wait(admission.engine_request_id)
