"""PD's side of the handover, inside EngineCore: decide, pin, wait, wake, release.

Everything here runs on EngineCore's own thread, except `post`: the store session's and the bus's
threads leave what they heard in an inbox and wake the engine; `drain` takes it from there. So there
are no locks, and no wake-up is lost. `scheduler.ParkingMixin` and `connector` call in.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from triptych_common.domain.errors import StoreError
from triptych_common.protocol.messages import Decision, EncodeNeeded, EncoderCacheMetadata, Outcome
from triptych_common.protocol.store import EntrySealed, Pinned, StoreFailure, StoreReply, Watching, WriterLost
from triptych_common.telemetry import record_span
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.admission import Admission, make_admission
from triptych_vllm_connector.conversation import Addressed, Conversation
from triptych_vllm_connector.items import ItemState, ItemTable, LoadOrder
from triptych_vllm_connector.links import PinLink, TalkLink
from triptych_vllm_connector.preallocator import Need, Preallocator

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
    """See the module docstring. `now_ns` is wall-clock time for spans."""

    def __init__(
        self,
        instance: str,
        pins: PinLink,
        talk: TalkLink,
        preallocator: Preallocator,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._instance = instance
        self._pins = pins
        self._talk = talk
        self._preallocator = preallocator
        self._now_ns = now_ns
        self._items = ItemTable()
        self._conversation = Conversation(instance)
        self._admissions: dict[str, Admission] = {}
        self._inbox: deque[Heard] = deque()
        self._to_wake: dict[str, None] = {}  # ordered set of engine request ids
        self._failed: set[str] = set()
        self._loads: list[LoadOrder] = []
        self._wake_engine: Callable[[], None] = lambda: None
        self._evict: Callable[[str], None] = lambda mm_hash: None

    def bind(self, evict: Callable[[str], None]) -> None:
        """`evict(mm_hash)` makes vLLM drop the item from its encoder cache."""
        self._evict = evict

    def attach_waker(self, wake_engine: Callable[[], None]) -> None:
        """`wake_engine` ends the engine's wait for input; called from other threads."""
        self._wake_engine = wake_engine

    # ---- other threads ---------------------------------------------------------------------------
    def post(self, heard: Heard) -> None:
        """Leave a message for the engine's thread, and wake it."""
        self._inbox.append(heard)
        self._wake_engine()

    # ---- scheduling ------------------------------------------------------------------------------
    def admit(self, request: Any, num_computed_tokens: int) -> bool:
        """May `request` be scheduled, given that `num_computed_tokens` are in the KV cache?

        Decides about its items on the way: covered ones are declined, the others preallocated and pinned.
        """
        admission = self._admissions.get(request.request_id)
        if admission is None:
            admission = make_admission(
                request.request_id, request.mm_features, request.ec_transfer_params, self._now_ns()
            )
            self._admissions[request.request_id] = admission
        if num_computed_tokens >= admission.last_end and not admission.is_first_pass:
            return True
        if admission.failure is not None:
            return False
        if admission.is_first_pass:
            admission.is_first_pass = False
            for feature in admission.covered_by(num_computed_tokens):
                key = (admission.wire_id, feature.item_index)
                self._say(
                    self._conversation.decided(key, feature.mm_hash, Decision.DECLINED, "prefix_cached"), admission
                )
                self._say(self._conversation.ended(key, feature.mm_hash, Outcome.SKIPPED), admission)
        needs = admission.needs_after(num_computed_tokens)
        self._preallocate(admission, needs)
        return admission.failure is None and self._is_ready(admission, needs)

    def is_ready(self, mm_hash: str) -> bool:
        """May a step that needs this item be scheduled? (Pinned for us, or in the worker already.)"""
        return self._items.is_ready(mm_hash)

    def must_load(self, mm_hash: str) -> bool:
        """Is the item pinned, so that the worker can load it?"""
        return self._items.is_pinned(mm_hash)

    def load(self, request_id: str, mm_hash: str) -> None:
        """vLLM gave the item space in its cache: the worker shall load it in this step."""
        admission = self._admissions.get(request_id)
        self._loads.append(self._items.load(mm_hash, admission.traceparent if admission else None))
        self._preallocator.finalize_allocation(mm_hash)

    def take_loads(self) -> list[LoadOrder]:
        loads, self._loads = self._loads, []
        return loads

    # ---- the end of items and requests -----------------------------------------------------------
    def computed(self, request_id: str, item_index: int) -> None:
        """The item's placeholder is in the KV cache of `request_id`."""
        admission = self._admissions.get(request_id)
        if admission is None:
            return
        feature = admission.features[item_index]
        self._say(
            self._conversation.ended((admission.wire_id, item_index), feature.mm_hash, Outcome.INJECTED), admission
        )
        if admission.is_last_use(feature.mm_hash, item_index):
            self._release(admission, [feature.mm_hash])

    def preempted(self, request_id: str) -> None:
        """It starts again from nothing: give everything back; `admit` will ask anew."""
        admission = self._admissions.get(request_id)
        if admission is not None:
            self._release(admission, list(admission.granted))
            self._preallocator.depreallocate(request_id)

    def finished(self, request_id: str, num_computed_tokens: int) -> None:
        """Answered, aborted or failed: say the last word about every item, and give everything back."""
        admission = self._admissions.pop(request_id, None)
        self._failed.discard(request_id)
        self._to_wake.pop(request_id, None)
        if admission is None:
            return
        for feature in admission.features:
            key = (admission.wire_id, feature.item_index)
            if feature.end <= num_computed_tokens:
                self._say(self._conversation.ended(key, feature.mm_hash, Outcome.INJECTED), admission)
            elif admission.failure is not None:
                self._say(
                    self._conversation.ended(key, feature.mm_hash, Outcome.FAILED, admission.failure), admission
                )
            else:
                self._say(
                    self._conversation.decided(key, feature.mm_hash, Decision.DECLINED, "request_gone"), admission
                )
                self._say(self._conversation.ended(key, feature.mm_hash, Outcome.SKIPPED), admission)
        self._release(admission, list(admission.granted))
        self._preallocator.depreallocate(request_id)
        self._wake_granted()

    # ---- waiting and waking ----------------------------------------------------------------------
    def parked(self, request_id: str, step: int) -> None:
        admission = self._admissions.get(request_id)
        if admission is not None and admission.parked_ns is None:
            admission.parked_ns, admission.parked_at_step = self._now_ns(), step

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
                    self._on_pinned(heard.descriptor.mm_hash, heard.pin_id, heard)
                case WriterLost():
                    self._order_again(heard.mm_hash, "writer_lost")
                case EncoderCacheMetadata():
                    self._say(self._conversation.metadata(heard), None)
                case StoreLost():
                    self._on_store_lost()
        to_wake, self._to_wake = self._to_wake, {}
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
        }

    # ---- inside ----------------------------------------------------------------------------------
    def _preallocate(self, admission: Admission, needs: list[Need]) -> None:
        missing = [need for need in needs if need.mm_hash not in admission.granted]
        if not missing or self._preallocator.is_pending(admission.engine_id):
            return
        for need in missing:
            if not self._preallocator.can_ever_hold(need):
                self._fail(admission, f"an item of {need.num_embeds} rows is larger than the encoder cache")
                return
        if admission.granted:  # the cached prefix shrank: ask again as a whole, hold nothing meanwhile
            self._release(admission, list(admission.granted))
            self._preallocator.depreallocate(admission.engine_id)
            missing = needs
        self._granted(admission, self._preallocator.preallocate(admission.engine_id, missing))

    def _granted(self, admission: Admission, needs: Iterable[Need]) -> None:
        for need in needs:
            admission.granted.add(need.mm_hash)
            for feature in admission.features_of(need.mm_hash):
                key = (admission.wire_id, feature.item_index)
                self._say(self._conversation.decided(key, feature.mm_hash, Decision.GRANTED), admission)
            if self._items.acquire(need.mm_hash, admission.engine_id):
                self._pins.pin_or_watch(need.mm_hash)
        if admission.granted and not admission.grant_recorded:
            admission.grant_recorded = True
            self._record("prefill.preallocate", admission, admission.first_seen_ns, {})

    def _is_ready(self, admission: Admission, needs: list[Need]) -> bool:
        if self._preallocator.is_pending(admission.engine_id):  # larger than the budget: item by item
            needs = needs[:1]
        return all(need.mm_hash in admission.granted and self._items.is_ready(need.mm_hash) for need in needs)

    def _wake_if_ready(self, engine_id: str) -> None:
        admission = self._admissions.get(engine_id)
        if admission is None:
            return
        held = [need for need in admission.needs_after(0) if need.mm_hash in admission.granted]
        if held and self._is_ready(admission, held):
            self._to_wake[engine_id] = None

    def _on_reply(self, mm_hash: str, reply: StoreReply | StoreError) -> None:
        match reply:
            case Pinned():
                self._on_pinned(mm_hash, reply.pin_id, reply)
            case Watching():
                if not reply.writing:
                    self._order_again(mm_hash, "absent")
            case StoreError():
                self._fail_holders(mm_hash, f"the cache store refused: {reply}")
            case StoreFailure():
                self._fail_holders(mm_hash, f"the cache store refused: {reply.code}")
            case _:
                self._fail_holders(mm_hash, f"the cache store answered {reply.kind!r} to pin_or_watch")

    def _on_pinned(self, mm_hash: str, pin_id: int, pinned: Pinned | EntrySealed) -> None:
        if not self._items.pinned(mm_hash, pin_id, pinned.descriptor):
            self._pins.unpin(pin_id)
            return
        for engine_id in self._items.holders(mm_hash):
            self._wake_if_ready(engine_id)

    def _order_again(self, mm_hash: str, reason: Any) -> None:
        """Nobody makes this item: ask a gateway that still has the media."""
        for engine_id in self._items.holders(mm_hash):
            admission = self._admissions.get(engine_id)
            if admission is None or admission.gateway is None:
                continue
            feature = admission.features_of(mm_hash)[0]
            message = EncodeNeeded(
                request_id=admission.wire_id,
                item_index=feature.item_index,
                mm_hash=mm_hash,
                prefill_decode=self._instance,
                reason=reason,
            )
            log.info("encode needed", mm_hash=mm_hash, request_id=admission.wire_id, reason=reason)
            self._talk.to_gateway(admission.gateway, message, admission.traceparent)
            return
        self._fail_holders(mm_hash, "the item is not in the cache store and nobody can encode it")

    def _on_store_lost(self) -> None:
        for item in self._items.lose_unloaded():
            for engine_id in item.holders:
                admission = self._admissions.get(engine_id)
                if admission is not None:
                    admission.granted.discard(item.mm_hash)
                    self._preallocator.deallocate(engine_id, item.mm_hash)
                    self._fail(admission, "the cache store went away")

    def _fail_holders(self, mm_hash: str, why: str) -> None:
        for engine_id in self._items.holders(mm_hash):
            admission = self._admissions.get(engine_id)
            if admission is not None:
                self._fail(admission, why)

    def _fail(self, admission: Admission, why: str) -> None:
        """End the request with an error at the next step. It is woken for that."""
        if admission.failure is None:
            admission.failure = why
            self._failed.add(admission.engine_id)
            self._to_wake[admission.engine_id] = None
            log.warning("request failed", request_id=admission.wire_id, reason=why)

    def _release(self, admission: Admission, mm_hashes: list[str]) -> None:
        for mm_hash in mm_hashes:
            admission.granted.discard(mm_hash)
            self._preallocator.deallocate(admission.engine_id, mm_hash)
            item = self._items.release(mm_hash, admission.engine_id)
            if item is None:
                continue
            if item.state is ItemState.WATCHING:
                self._pins.unwatch(mm_hash)
            elif item.state is ItemState.PINNED and item.pin_id is not None:
                self._pins.unpin(item.pin_id)
            else:
                self._withdraw_load(mm_hash)
                self._evict(mm_hash)
        self._wake_granted()

    def _withdraw_load(self, mm_hash: str) -> None:
        """A request that was scheduled and preempted in one pass: no worker will see the load."""
        for order in [order for order in self._loads if order.mm_hash == mm_hash]:
            self._loads.remove(order)
            self._pins.unpin(order.pin_id)

    def _wake_granted(self) -> None:
        for engine_id, needs in self._preallocator.take_granted():
            admission = self._admissions.get(engine_id)
            if admission is None:
                self._preallocator.depreallocate(engine_id)
                continue
            self._granted(admission, needs)
            self._wake_if_ready(engine_id)

    def _say(self, words: list[Addressed], admission: Admission | None) -> None:
        for word in words:
            self._talk.to_encoder(word.encoder, word.message, admission.traceparent if admission else None)

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
