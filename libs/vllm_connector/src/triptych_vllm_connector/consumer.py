"""PD's side of the handover, inside EngineCore: decide, pin, wait, wake, release.

Everything here runs on EngineCore's own thread, except `post`: the store session's and the bus's
threads leave what they heard in an inbox and wake the engine; `drain` takes it from there. So there
are no locks, and no wake-up is lost. `scheduler.ParkingMixin` and `connector` call in.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

from triptych_common.domain.errors import StoreError
from triptych_common.protocol.messages import EncoderCacheMetadata
from triptych_common.protocol.store import EntrySealed, Pinned, StoreFailure, StoreReply, Watching, WriterLost
from triptych_common.telemetry import record_span
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.admission import Admission, fault_of, make_admission
from triptych_vllm_connector.deadlines import GRACE_S, RENEWED_WAIT_S, Deadlines
from triptych_vllm_connector.holdings import Holdings
from triptych_vllm_connector.items import Item, ItemState, LoadOrder
from triptych_vllm_connector.links import PinLink, TalkLink
from triptych_vllm_connector.preallocator import Need, Preallocator
from triptych_vllm_connector.speech import Speech
from triptych_vllm_connector.tower import no_tower

log = get_logger(__name__)


class StoreLost:
    """Inbox: the store session ended; every pin that no worker holds is gone."""


class PinReply:
    """Inbox: the store's answer to one `pin_or_watch`."""

    def __init__(self, mm_hash: str, reply: StoreReply | StoreError) -> None:
        self.mm_hash = mm_hash
        self.reply = reply


Heard = PinReply | EntrySealed | WriterLost | EncoderCacheMetadata | StoreLost


class Consumer:
    """See the module docstring. `now_ns` is wall-clock time for spans, `now` monotonic seconds.

    `encodes(request)`: is it encoded by this instance itself? Then it only needs space.
    """

    def __init__(
        self,
        instance: str,
        pins: PinLink,
        talk: TalkLink,
        preallocator: Preallocator,
        now_ns: Callable[[], int] = time.time_ns,
        now: Callable[[], float] = time.monotonic,
        encodes: Callable[[Any], bool] = no_tower,
    ) -> None:
        self._instance = instance
        self._holdings = Holdings(pins)
        self._items = self._holdings.items
        self._speech = Speech(instance, talk)
        self._preallocator = preallocator
        self._now_ns = now_ns
        self._now = now
        self._encodes = encodes
        self.deadlines = Deadlines()
        self.plans_local = False  # does vLLM plan a local request? It asks for a tensor by its name alone
        self._admissions: dict[str, Admission] = {}
        self._inbox: deque[Heard] = deque()
        self.is_store_lost = False  # the lease is gone for good: views may be overwritten
        self._to_wake: dict[str, None] = {}  # ordered set of engine request ids
        self._failed: set[str] = set()
        self._wake_engine: Callable[[], None] = lambda: None
        self._is_in_use: Callable[[str, int], bool] = lambda request_id, item_index: False

    def bind(self, evict: Callable[[str], None], is_in_use: Callable[[str, int], bool]) -> None:
        """`evict(mm_hash)` makes vLLM drop the item from its encoder cache.

        `is_in_use(request_id, item_index)`: has vLLM scheduled the item there, so will it say `computed`?
        """
        self._holdings.bind(evict)
        self._is_in_use = is_in_use

    def attach_waker(self, wake_engine: Callable[[], None]) -> None:
        """`wake_engine` ends the engine's wait for input; called from other threads."""
        self._wake_engine = wake_engine

    # ---- other threads ---------------------------------------------------------------------------
    def post(self, heard: Heard) -> None:
        """Leave a message for the engine's thread, and wake it."""
        self._inbox.append(heard)
        self.wake()

    def wake(self) -> None:
        """End the engine's wait for input: something is to be done."""
        self._wake_engine()

    # ---- scheduling ------------------------------------------------------------------------------
    def admit(self, request: Any, num_computed_tokens: int) -> bool:
        """May `request` be scheduled, given that `num_computed_tokens` are in the KV cache?

        Decides about its items on the way: covered ones are declined, the others preallocated and pinned.
        """
        admission = self._admissions.get(request.request_id)
        if admission is None:
            admission = self._open(request, num_computed_tokens)
        if admission.failure is not None:
            return False
        if not admission.asked and num_computed_tokens >= admission.last_end:
            return True
        needs = admission.needs_after(num_computed_tokens)
        is_ready = self._ask(admission, needs) and self._is_ready(admission, needs)
        admission.waits = not is_ready
        return is_ready

    def is_local(self, request_id: str) -> bool:
        """Are its items encoded by this instance?"""
        admission = self._admissions.get(request_id)
        return admission is not None and admission.is_local

    def may_encode(self, request_id: str, item_index: int) -> bool:
        """Of a local request: has this place space?"""
        admission = self._admissions.get(request_id)
        return admission is not None and admission.is_local and item_index in admission.granted

    def must_load(self, mm_hash: str) -> bool:
        """Is the item pinned, so that the worker can load it?"""
        return self._items.state(mm_hash) is ItemState.PINNED

    def is_resident(self, mm_hash: str) -> bool:
        """Has the worker a view of the item that a request of ours still needs?"""
        return self._items.state(mm_hash) is ItemState.RESIDENT

    def load(self, request_id: str, mm_hash: str) -> None:
        """vLLM gave the item space in its cache: the worker shall load it in this step."""
        admission = self._admissions.get(request_id)
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
                admission = self._admissions[engine_id]
                starts = [feature.start for feature in admission.features if feature.mm_hash == mm_hash]
                first_tokens[engine_id] = min(starts[0], first_tokens.get(engine_id, starts[0]))
                self._fail(admission, "the item could not be read")
        return first_tokens

    def fail(self, request_id: str, why: str) -> None:
        """End the request with an error."""
        admission = self._admissions.get(request_id)
        if admission is not None:
            self._fail(admission, why)

    # ---- the end of items and requests -----------------------------------------------------------
    def computed(self, request_id: str, item_index: int) -> None:
        """The item's placeholder is in the KV cache of `request_id`."""
        admission = self._admissions.get(request_id)
        if admission is None or admission.failure is not None:
            return
        self._speech.injected(admission, admission.features[item_index])
        self._drop(admission, {item_index})
        self._wake_granted()

    def preempted(self, request_id: str) -> None:
        """It starts again from nothing: give everything back; `admit` will ask anew."""
        admission = self._admissions.get(request_id)
        if admission is not None:
            self._give_back(admission)
            self._renew(admission)

    def views_forgotten(self) -> None:
        """vLLM emptied its encoder cache: what was there is asked for anew."""
        self._holdings.forget_views()

    def finished(self, request: Any, num_computed_tokens: int) -> None:
        """Answered, aborted or failed: say the last word about every item, and give everything back.

        `request` may never have been admitted; its encoders wait for a word all the same.
        """
        admission = self._admissions.pop(request.request_id, None)
        self._failed.discard(request.request_id)
        self.deadlines.discard(request.request_id)
        self._to_wake.pop(request.request_id, None)
        if admission is None:
            admission, num_computed_tokens = self._admission_of(request), 0
        self._speech.closed(admission)
        for feature in admission.features:
            if admission.failure is not None:
                self._speech.failed(admission, feature)
            elif feature.end <= num_computed_tokens:
                self._speech.injected(admission, feature)
            else:
                self._speech.unused(admission, feature, "request_gone")
        self._give_back(admission)

    # ---- waiting and waking ----------------------------------------------------------------------
    def expect(self, request: Any) -> None:
        """A request came: how long it may wait counts from now."""
        if not self._encodes(request) and fault_of(request.mm_features, request.ec_transfer_params) is None:
            remaining_ms = (request.ec_transfer_params or {}).get("remaining_ms")
            if remaining_ms is not None:
                self.deadlines.set(request.request_id, self._now() + remaining_ms / 1000 + GRACE_S)

    def overdue(self, request: Any) -> None:
        """It waits, and its time is up: end it with an error."""
        admission = self._admissions.get(request.request_id)
        if admission is None:  # not even looked at yet
            admission = self._admissions[request.request_id] = self._admission_of(request)
            self._speech.opened(admission)
        self._fail(admission, "its time is up")

    def is_waiting(self, request_id: str) -> bool:
        """Was the last word about it no, and nothing has changed since?"""
        admission = self._admissions.get(request_id)
        return admission is not None and admission.waits and admission.failure is None

    def parked(self, request_id: str, step: int) -> None:
        admission = self._admissions.get(request_id)
        if admission is not None and admission.parked_ns is None:
            admission.parked_ns, admission.parked_at_step = self._now_ns(), step
            if not self.deadlines.has(request_id):
                self._renew(admission)

    def unparked(self, request_id: str, step: int) -> None:
        admission = self._admissions.get(request_id)
        if admission is None or admission.parked_ns is None:
            return
        self._record(
            "prefill.wait",
            admission,
            admission.parked_ns,
            {"triptych.num_engine_steps": step - admission.parked_at_step},
        )
        admission.parked_ns = None

    def drain(self) -> list[str]:
        """Handle what other threads left. Returns the requests that shall leave the parking."""
        while self._inbox:
            heard = self._inbox.popleft()
            match heard:
                case PinReply():
                    self._on_reply(heard.mm_hash, heard.reply)
                case EntrySealed():
                    self._on_pinned(heard.descriptor.mm_hash, heard)
                case WriterLost():
                    self._order_again(heard.mm_hash, "writer_lost")
                case EncoderCacheMetadata():
                    self._speech.metadata(heard)
                case StoreLost():
                    self._on_store_lost()
        to_wake, self._to_wake = self._to_wake, {}
        for engine_id in to_wake:
            self._admissions[engine_id].waits = False
        return list(to_wake)

    def take_failed(self) -> set[str]:
        """Requests whose items can no longer come. vLLM ends them with an error."""
        failed, self._failed = self._failed, set()
        return failed

    def has_failed(self, request_id: str) -> bool:
        admission = self._admissions.get(request_id)
        return admission is not None and admission.failure is not None

    def counts(self) -> dict[str, int]:
        """For tests, metrics and the invariant that all are 0 when idle."""
        return {
            "requests": len(self._admissions),
            "watching": self._items.count(ItemState.WATCHING),
            "pinned": self._items.count(ItemState.PINNED),
            "resident": self._items.count(ItemState.RESIDENT),
            "pending": self._preallocator.num_pending,
            "preallocated_embeds": self._preallocator.num_embeds_used,
        }

    # ---- inside: requests ------------------------------------------------------------------------
    def _admission_of(self, request: Any) -> Admission:
        is_local = self._encodes(request)
        fault = None if is_local else fault_of(request.mm_features, request.ec_transfer_params)
        params = request.ec_transfer_params if fault is None else None
        admission = make_admission(request.request_id, request.mm_features, params, self._now_ns())
        admission.fault, admission.is_local = fault, is_local
        return admission

    def _open(self, request: Any, num_computed_tokens: int) -> Admission:
        """First sight of a request: what the KV cache covers is not to be sent."""
        admission = self._admissions[request.request_id] = self._admission_of(request)
        self._speech.opened(admission)
        if admission.fault is not None:
            self._fail(admission, admission.fault)
            return admission
        for feature in admission.covered_by(num_computed_tokens):
            self._speech.unused(admission, feature, "prefix_cached")
        return admission

    def _ask(self, admission: Admission, needs: list[Need]) -> bool:
        """Have space asked for, for exactly `needs`. False: one of them can never have it.

        The cached prefix may have shrunk since the last time: then it asks again as a whole, and holds
        nothing meanwhile. Or it has grown: then what it covers is given back.
        """
        wanted = {need.item_index for need in needs}
        unused = self._unused(admission, wanted)
        is_short = not wanted <= admission.asked
        if not is_short and not unused:
            return True
        for need in needs:
            if not self._preallocator.can_ever_hold(need):
                self._speech.declined(admission, admission.features[need.item_index], "too_large")
                self._fail(admission, f"an item of {need.num_embeds} rows is larger than the encoder cache")
                self._wake_granted()
                return False
        for item_index in sorted(unused):
            self._speech.unused(admission, admission.features[item_index], "prefix_cached")
        self._drop(admission, set(admission.asked) if is_short else unused)
        admission.asked |= wanted
        rest = [need for need in needs if need.item_index not in admission.granted]
        if rest or self._preallocator.is_pending(admission.engine_id):
            self._granted(admission, self._preallocator.preallocate(admission.engine_id, rest))
        self._wake_granted()
        return True

    def _unused(self, admission: Admission, wanted: set[int]) -> set[int]:
        """Places that were asked for, and that the KV cache covers without that they were ever scheduled."""
        covered = admission.asked - wanted
        return {index for index in covered if not self._is_in_use(admission.engine_id, index)}

    def _granted(self, admission: Admission, needs: Iterable[Need]) -> None:
        for need in needs:
            admission.grant(need.item_index)
            if admission.is_local:
                continue
            self._speech.granted(admission, admission.features[need.item_index])
            self._holdings.acquire(need.mm_hash, admission.engine_id)
            if self._items.num_rows(need.mm_hash) not in (None, need.num_embeds):
                self._fail(admission, f"the item has other rows than the {need.num_embeds} that are expected")
        if admission.granted and not admission.grant_recorded:
            admission.grant_recorded = True
            self._record("prefill.preallocate", admission, admission.first_seen_ns, {})

    def _is_ready(self, admission: Admission, needs: list[Need]) -> bool:
        """Is every item here? Of a request larger than the budget: every item that it was granted so far?"""
        granted = [need for need in needs if need.item_index in admission.granted]
        if len(granted) < len(needs) and (not granted or granted[0] is not needs[0]):
            return False
        return admission.is_local or all(self._items.is_ready(need.mm_hash) for need in granted)

    def _renew(self, admission: Admission) -> None:
        """It has begun, and waits again: not for ever."""
        if admission.gateway is not None:
            self.deadlines.set(admission.engine_id, self._now() + RENEWED_WAIT_S)

    def _give_back(self, admission: Admission) -> None:
        self._preallocator.depreallocate(admission.engine_id)
        self._drop(admission, set(admission.asked))
        self._wake_granted()

    def _drop(self, admission: Admission, item_indexes: set[int]) -> None:
        """These places need no space. The caller lets others hear of it (`_wake_granted`)."""
        for item_index in sorted(item_indexes):
            if admission.drop(item_index):  # the item's last place
                mm_hash = admission.features[item_index].mm_hash
                self._preallocator.deallocate(admission.engine_id, mm_hash)
                if not admission.is_local:
                    self._holdings.release(mm_hash, admission.engine_id)

    def _wake_granted(self) -> None:
        for engine_id, needs in self._preallocator.take_granted():
            self._granted(self._admissions[engine_id], needs)  # who waits for space lives
            self._wake_if_ready(engine_id)

    def _wake_if_ready(self, engine_id: str) -> None:
        admission = self._admissions.get(engine_id)
        if admission is None or not admission.granted:
            return
        features = (admission.features[index] for index in admission.granted)
        if admission.is_local or all(self._items.is_ready(feature.mm_hash) for feature in features):
            self._to_wake[engine_id] = None

    def _fail(self, admission: Admission, why: str) -> None:
        """End the request with an error at the next step; it is woken for that, and waits for nothing."""
        if admission.failure is None:
            admission.failure = why
            self._preallocator.preallocate(admission.engine_id, [])
            admission.asked &= admission.granted
            self._failed.add(admission.engine_id)
            self._to_wake[admission.engine_id] = None
            log.warning("request failed", request_id=admission.wire_id, reason=why)

    # ---- inside: what was heard ------------------------------------------------------------------
    def _on_reply(self, mm_hash: str, reply: StoreReply | StoreError) -> None:
        match reply:
            case Pinned():
                self._on_pinned(mm_hash, reply)
            case Watching():
                self._on_watching(mm_hash, reply)
            case StoreError():
                self._will_not_come(mm_hash, f"the cache store refused: {reply}")
            case StoreFailure():
                self._will_not_come(mm_hash, f"the cache store refused: {reply.code}")
            case _:
                self._will_not_come(mm_hash, f"the cache store answered {reply.kind!r} to pin_or_watch")

    def _on_pinned(self, mm_hash: str, pinned: Pinned | EntrySealed) -> None:
        num_embeds = pinned.descriptor.spec.shape[0]
        if any(
            feature.num_embeds != num_embeds
            for engine_id in self._items.holders(mm_hash)
            for feature in self._admissions[engine_id].features
            if feature.mm_hash == mm_hash
        ):  # wrong rows would be wrong answers, or the engine's end
            self._holdings.give_back(pinned.pin_id)
            self._will_not_come(
                mm_hash, f"the encoder made {num_embeds} rows, and the request expects others"
            )
            return
        if self._holdings.pinned(mm_hash, pinned.pin_id, pinned.descriptor):
            for engine_id in self._items.holders(mm_hash):
                self._wake_if_ready(engine_id)

    def _on_watching(self, mm_hash: str, reply: Watching) -> None:
        if self._items.state(mm_hash) is not ItemState.WATCHING:
            self._holdings.unwatch(mm_hash)  # asked for by somebody who has left since
        elif not reply.writing:
            self._order_again(mm_hash, "absent")

    def _order_again(self, mm_hash: str, reason: Literal["absent", "writer_lost", "evicted"]) -> None:
        """Nobody makes this item: ask a gateway that still has the media."""
        if self._items.state(mm_hash) is not ItemState.WATCHING:
            return  # nobody needs it any more, or it came meanwhile
        for engine_id in self._items.holders(mm_hash):
            admission = self._admissions[engine_id]
            if admission.failure is None and admission.gateway is not None:
                log.info("encode needed", mm_hash=mm_hash, request_id=admission.wire_id, reason=reason)
                self._items.ordered(mm_hash, engine_id)
                self._speech.encode_needed(admission, mm_hash, reason)
                return
        self._will_not_come(mm_hash, "the item is not in the cache store and nobody can encode it")

    def _on_store_lost(self) -> None:
        self.is_store_lost = True
        for item in self._items.lose_unloaded():
            self._fail_holders(item, "the cache store went away")
        self._wake_granted()

    def _will_not_come(self, mm_hash: str, why: str) -> None:
        """Fail those that wait for the item. Of one that came meanwhile this is an old story."""
        item = self._holdings.lose_watched(mm_hash)
        if item is not None:
            self._fail_holders(item, why)
            self._wake_granted()

    def _fail_holders(self, item: Item, why: str) -> None:
        """The item is out of the table: they do not hold it any more."""
        for engine_id in item.holders:
            admission = self._admissions[engine_id]
            admission.drop_item(item.mm_hash)
            self._preallocator.deallocate(engine_id, item.mm_hash)
            self._fail(admission, why)

    def _record(self, name: str, admission: Admission, start_ns: int, attributes: dict[str, Any]) -> None:
        record_span(
            name,
            start_ns,
            self._now_ns(),
            traceparent=admission.traceparent,
            attributes={
                "triptych.instance": self._instance,
                "triptych.request_id": admission.wire_id,
                "triptych.num_items": len(admission.features),
                **attributes,
            },
        )
