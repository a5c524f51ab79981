"""PD's side of the handover, inside EngineCore: decide, pin, wait, wake, release.

    scheduler, connector ──▶ Consumer ──▶ request_table  admissions; who is woken, who has failed
                                 │   ├──▶ grants         space for items, pins for what has space
    store, bus ──▶ inbox ──▶ drain   ├──▶ arrivals       what the store says about items
                                     └──▶ waits          spans and deadlines

Everything here runs on EngineCore's own thread, except `post` and `wake`: see `inbox`.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from triptych_common.protocol.messages import EncoderCacheMetadata
from triptych_common.protocol.store import EntrySealed, WriterLost
from triptych_vllm_connector.consumer.admission import Admission
from triptych_vllm_connector.consumer.arrivals import Arrivals
from triptych_vllm_connector.consumer.deadlines import Deadlines
from triptych_vllm_connector.consumer.item_grants import Grants
from triptych_vllm_connector.consumer.item_pins import ItemPins
from triptych_vllm_connector.consumer.item_table import ItemState, LoadOrder
from triptych_vllm_connector.consumer.local_encode import no_tower
from triptych_vllm_connector.consumer.preallocator import Preallocator
from triptych_vllm_connector.consumer.request_table import RequestTable
from triptych_vllm_connector.consumer.speech import Speech
from triptych_vllm_connector.consumer.waits import Waits
from triptych_vllm_connector.links.inbox import BusChanged, Heard, Inbox, PinReply, StoreLost
from triptych_vllm_connector.links.links import MessageSender, PinLink


class Consumer:
    """What vLLM's scheduler asks and tells. `now_ns` is wall-clock time for spans, `now` monotonic seconds.

    `encodes(request)`: is it encoded by this instance itself? Then it only needs space. `inbox`: where its
    links leave what they hear, from the moment they are open.
    """

    def __init__(
        self,
        instance: str,
        pins: PinLink,
        talk: MessageSender,
        preallocator: Preallocator,
        now_ns: Callable[[], int] = time.time_ns,
        now: Callable[[], float] = time.monotonic,
        encodes: Callable[[Any], bool] = no_tower,
        inbox: Inbox | None = None,
    ) -> None:
        self._preallocator = preallocator
        self._inbox = Inbox() if inbox is None else inbox
        self._holdings = ItemPins(pins)
        self._items = self._holdings.items
        self._speech = Speech(instance, talk)
        self._waits = Waits(instance, now_ns, now)
        self._requests = RequestTable(self._speech, preallocator, encodes, now_ns)
        self._grants = Grants(self._requests, self._holdings, preallocator, self._speech, self._waits)
        self._arrivals = Arrivals(self._requests, self._holdings, self._grants, preallocator, self._speech)
        self.is_store_lost = False  # the lease is gone for good: views may be overwritten
        self.plans_local = False  # does vLLM plan a local request? It asks for a tensor by its name alone

    @property
    def deadlines(self) -> Deadlines:
        return self._waits.deadlines

    def bind(self, evict: Callable[[str], None], is_in_use: Callable[[str, int], bool]) -> None:
        """`evict(mm_hash)` makes vLLM drop the item from its encoder cache.

        `is_in_use(request_id, item_index)`: has vLLM scheduled the item there, so will it say `computed`?
        """
        self._holdings.bind(evict)
        self._grants.bind(is_in_use)

    def attach_waker(self, wake_engine: Callable[[], None]) -> None:
        """`wake_engine` ends the engine's wait for input; called from other threads."""
        self._inbox.attach_waker(wake_engine)

    # ---- other threads ---------------------------------------------------------------------------
    def post(self, heard: Heard) -> None:
        """Leave a message for the engine's thread, and wake it."""
        self._inbox.post(heard)

    def wake(self) -> None:
        """End the engine's wait for input: something is to be done."""
        self._inbox.wake()

    # ---- scheduling ------------------------------------------------------------------------------
    def admit(self, request: Any, num_computed_tokens: int) -> bool:
        """May `request` be scheduled, given that `num_computed_tokens` are in the KV cache?

        Decides about its items on the way: covered ones are declined, the others preallocated and pinned.
        """
        admission = self._requests.get(request.request_id)
        if admission is None:
            admission = self._open(request, num_computed_tokens)
        if admission.failure is not None:
            return False
        if not admission.asked and num_computed_tokens >= admission.last_end:
            return True
        needs = admission.needs_after(num_computed_tokens)
        is_ready = self._grants.ask(admission, needs) and self._grants.is_ready(admission, needs)
        admission.waits = not is_ready
        return is_ready

    def is_local(self, request_id: str) -> bool:
        """Are its items encoded by this instance?"""
        admission = self._requests.get(request_id)
        return admission is not None and admission.is_local

    def may_encode(self, request_id: str, item_index: int) -> bool:
        """Of a local request: has this place space?"""
        admission = self._requests.get(request_id)
        return admission is not None and admission.is_local and item_index in admission.granted

    def must_load(self, mm_hash: str) -> bool:
        """Is the item pinned, so that the worker can load it?"""
        return self._items.state(mm_hash) is ItemState.PINNED

    def is_resident(self, mm_hash: str) -> bool:
        """Has the worker a view of the item that a request of ours still needs?"""
        return self._items.state(mm_hash) is ItemState.RESIDENT

    def load(self, request_id: str, mm_hash: str) -> None:
        """vLLM gave the item space in its cache: the worker shall load it in this step."""
        admission = self._requests.get(request_id)
        if admission is None or not admission.is_local:
            self._holdings.load(mm_hash, admission.traceparent if admission else None)
        self._preallocator.finalize_allocation(mm_hash)

    def take_loads(self) -> list[LoadOrder]:
        return self._holdings.take_loads()

    def load_lost(self, mm_hashes: Iterable[str]) -> dict[str, int]:
        """The worker had to put zeros in the place of these items: who holds them fails.

        Returns:
            Those requests, with the index of the first token whose key and value may be wrong.
        """
        first_tokens: dict[str, int] = {}
        for mm_hash in mm_hashes:
            for engine_id in self._items.holders(mm_hash):
                admission = self._requests[engine_id]
                start = next(each.start for each in admission.features if each.mm_hash == mm_hash)
                first_tokens[engine_id] = min(start, first_tokens.get(engine_id, start))
                self._requests.fail(admission, "the item could not be read")
        return first_tokens

    def fail(self, request_id: str, why: str) -> None:
        """End the request with an error."""
        admission = self._requests.get(request_id)
        if admission is not None:
            self._requests.fail(admission, why)

    # ---- the end of items and requests -----------------------------------------------------------
    def computed(self, request_id: str, item_index: int) -> None:
        """The item's placeholder is in the KV cache of `request_id`."""
        admission = self._requests.get(request_id)
        if admission is None or admission.failure is not None:
            return
        self._speech.injected(admission, admission.features[item_index])
        self._grants.give_back_place(admission, item_index)

    def preempted(self, request_id: str) -> None:
        """It starts again from nothing: give everything back; `admit` will ask anew."""
        admission = self._requests.get(request_id)
        if admission is not None:
            self._grants.give_back(admission)
            self._waits.renew(admission)

    def views_forgotten(self) -> None:
        """vLLM emptied its encoder cache: what was there is asked for anew."""
        self._holdings.forget_views()

    def finished(self, request: Any, num_computed_tokens: int) -> None:
        """Answered, aborted or failed: say the last word about every item, and give everything back.

        `request` may never have been admitted; its encoders wait for a word all the same.
        """
        admission = self._requests.take(request)
        self.deadlines.discard(request.request_id)
        if admission is None:
            admission, num_computed_tokens = self._requests.unseen(request), 0
        self._speech.closed(admission)
        for feature in admission.features:
            if admission.failure is not None:
                self._speech.failed(admission, feature)
            elif feature.end <= num_computed_tokens:
                self._speech.injected(admission, feature)
            else:
                self._speech.unused(admission, feature, "request_gone")
        self._grants.give_back(admission)

    # ---- waiting and waking ----------------------------------------------------------------------
    def expect(self, request: Any) -> None:
        """A request came: how long it may wait counts from now."""
        remaining_s = self._requests.remaining_s(request)
        if remaining_s is not None:
            self._waits.expect(request.request_id, remaining_s)

    def overdue(self, request: Any) -> None:
        """It waits, and its time is up: end it with an error."""
        admission = self._requests.get(request.request_id) or self._requests.add(request)
        self._requests.fail(admission, "its time is up")

    def is_waiting(self, request_id: str) -> bool:
        """Was the last word about it no, and nothing has changed since?"""
        admission = self._requests.get(request_id)
        return admission is not None and admission.waits and admission.failure is None

    def parked(self, request_id: str, step: int) -> None:
        """`step`: the engine's steps so far."""
        admission = self._requests.get(request_id)
        if admission is not None:
            self._waits.parked(admission, step)

    def unparked(self, request_id: str, step: int) -> None:
        admission = self._requests.get(request_id)
        if admission is not None:
            self._waits.unparked(admission, step)

    def drain(self) -> list[str]:
        """Handle what other threads left. Returns the requests that shall leave the parking."""
        for heard in self._inbox.take_all():
            match heard:
                case PinReply():
                    self._arrivals.replied(heard.mm_hash, heard.reply)
                case EntrySealed():
                    self._arrivals.pinned(heard.descriptor.mm_hash, heard)
                case WriterLost():
                    self._arrivals.writer_lost(heard.mm_hash)
                case EncoderCacheMetadata():
                    self._speech.metadata(heard)
                case StoreLost():
                    self.is_store_lost = True
                    self._arrivals.store_lost()
                case BusChanged():
                    self._holdings.ask_again()
        return self._requests.take_to_wake()

    def take_failed(self) -> set[str]:
        """Requests whose items can no longer come. vLLM ends them with an error."""
        return self._requests.take_failed()

    def has_failed(self, request_id: str) -> bool:
        admission = self._requests.get(request_id)
        return admission is not None and admission.failure is not None

    def counts(self) -> dict[str, int]:
        """For tests, metrics and the invariant that all are 0 when idle."""
        return {
            "requests": len(self._requests),
            "watching": self._items.count(ItemState.WATCHING),
            "pinned": self._items.count(ItemState.PINNED),
            "resident": self._items.count(ItemState.RESIDENT),
            "pending": self._preallocator.num_pending,
            "preallocated_embeds": self._preallocator.num_embeds_used,
        }

    def _open(self, request: Any, num_computed_tokens: int) -> Admission:
        """First sight of a request: what the KV cache covers is not to be sent."""
        admission = self._requests.add(request)
        if admission.fault is not None:
            self._requests.fail(admission, admission.fault)
            return admission
        for feature in admission.covered_by(num_computed_tokens):
            self._speech.unused(admission, feature, "prefix_cached")
        return admission
