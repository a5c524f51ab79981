"""Applies the preallocator's decisions: requests space, pins items, handles the store's replies."""

from collections.abc import Iterable

from triptych_common.domain.errors import StoreError
from triptych_common.protocol.store import EntrySealed, Pinned, StoreFailure, StoreReply, Watching
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.consumer.admission import Admission, Feature
from triptych_vllm_connector.consumer.item_pins import EngineItem, EngineItemState, ItemPins
from triptych_vllm_connector.consumer.item_replies import ItemReplies, NeedReason
from triptych_vllm_connector.consumer.overlap import OverlapPolicy, PromptPlace, Readiness
from triptych_vllm_connector.consumer.ports import EncoderCache
from triptych_vllm_connector.consumer.preallocator import Need, Preallocator
from triptych_vllm_connector.consumer.request_table import RequestTable

log = get_logger(__name__)


class ItemGrants:
    """Connects the preallocator, which decides about space, with the item pins, which get the tensors."""

    def __init__(
        self,
        requests: RequestTable,
        pins: ItemPins,
        preallocator: Preallocator,
        replies: ItemReplies,
        cache: EncoderCache,
        overlap: OverlapPolicy,
    ) -> None:
        self.overlap = overlap
        self._requests = requests
        self._pins = pins
        self._preallocator = preallocator
        self._replies = replies
        self._cache = cache

    # ---- space -----------------------------------------------------------------------------------
    def ask_space(self, admission: Admission, needs: list[Need]) -> bool:
        """Ask for space for exactly `needs`; False if one can never be had, and the request failed.

        If the cached prefix shrank, the request asks again as a whole and holds nothing meanwhile. If it
        grew, the places that it covers are given back.
        """
        needed = {need.item_index for need in needs}
        unused = self._unused_places(admission, needed)
        is_short = not needed <= admission.asked
        if not is_short and not unused:
            return True
        for need in needs:
            if not self._preallocator.can_ever_hold(need):
                self._replies.decline_item(admission, admission.features[need.item_index], "too_large")
                why = f"an item of {need.num_embeds} rows is larger than the encoder cache"
                self.fail_admission(admission, why)
                self._grant_pending()
                return False
        for item_index in sorted(unused):
            self._replies.skip_item(admission, admission.features[item_index], "prefix_cached")
        self._drop_places(admission, set(admission.asked) if is_short else unused)
        self._requests.ask_places(admission, needed)
        rest = [need for need in needs if need.item_index not in admission.granted]
        if rest:
            self._grant_needs(admission, self._preallocator.preallocate(admission.engine_request_id, rest))
        else:
            self._preallocator.cancel_pending(admission.engine_request_id)
        self._grant_pending()
        return not admission.has_failed

    def readiness(self, admission: Admission, num_computed_tokens: int) -> Readiness:
        """Extent to which the request may run with `num_computed_tokens` in the KV cache."""
        places = (
            PromptPlace(
                feature.start,
                feature.end,
                feature.item_index in admission.granted,
                self._is_here(admission, feature),
            )
            for feature in admission.features
        )
        return self.overlap.readiness(
            places,
            num_computed_tokens,
            begins_whole=admission.begins_whole,
            goes_on=admission.readiness is Readiness.PART,
        )

    def num_missing(self, admission: Admission) -> int:
        """Number of items that the request needs and that are not here."""
        asked = [admission.features[item_index] for item_index in admission.asked]
        return len(
            {
                feature.mm_hash
                for feature in asked
                if feature.item_index not in admission.granted or not self._is_here(admission, feature)
            }
        )

    def give_back_request(self, admission: Admission) -> None:
        self._preallocator.depreallocate(admission.engine_request_id)
        self._drop_places(admission, set(admission.asked))
        self._grant_pending()

    def give_back_place(self, admission: Admission, item_index: int) -> None:
        self._drop_places(admission, {item_index})
        self._grant_pending()

    def wake_with_unused_places(self) -> None:
        """Wake waiting requests that hold space the KV cache has made unnecessary; their next question frees
        it."""
        for admission in self._requests.waiting():
            needs = admission.needs_after(admission.asked_at)
            if self._unused_places(admission, {need.item_index for need in needs}):
                self._requests.wake_request(admission)

    def fail_admission(self, admission: Admission, why: str) -> None:
        """End the request with an error at the next step, and stop waiting for space."""
        if self._requests.mark_failed(admission, why):
            self._preallocator.cancel_pending(admission.engine_request_id)

    # ---- the store's answers ---------------------------------------------------------------------
    def on_pin_reply(self, mm_hash: str, reply: StoreReply | StoreError) -> None:
        match reply:
            case Pinned():
                self.on_pinned(mm_hash, reply)
            case Watching():
                self._on_watching(mm_hash, reply)
            case StoreError():
                self._fail_item(mm_hash, f"the cache store refused: {reply}")
            case StoreFailure():
                self._fail_item(mm_hash, f"the cache store refused: {reply.code}")
            case _:
                self._fail_item(mm_hash, f"the cache store answered {reply.kind!r} to pin_or_watch")

    def on_pinned(self, mm_hash: str, pinned: Pinned | EntrySealed) -> None:
        """Take a pinned item if its rows are those that the requests expect."""
        num_embeds = pinned.descriptor.spec.shape[0]
        waiting = [self._requests[each] for each in self._pins.requests_of(mm_hash)]
        if any(place.num_embeds != num_embeds for each in waiting for place in each.places_of(mm_hash)):
            # Other rows would be wrong answers, or the engine's end.
            self._pins.refuse_pin(pinned.pin_id)
            self._fail_item(mm_hash, f"the encoder made {num_embeds} rows, and the request expects others")
        elif self._pins.keep_pin(mm_hash, pinned.pin_id, pinned.descriptor):
            for admission in waiting:
                self._wake_if_ready(admission)

    def on_writer_lost(self, mm_hash: str) -> None:
        self._order_again(mm_hash, "writer_lost")

    def on_store_lost(self) -> None:
        """Handle the end of the store session, and of every pin that no worker holds."""
        for item in self._pins.lose_unloaded():
            self._fail_requests_of(item, "the cache store went away")
        self._grant_pending()

    def _on_watching(self, mm_hash: str, reply: Watching) -> None:
        if self._pins.state_of(mm_hash) is not EngineItemState.WATCHING:
            self._pins.end_watch(mm_hash)  # the request that asked has left since
        elif not reply.writing:
            self._order_again(mm_hash, "absent")

    def _order_again(self, mm_hash: str, reason: NeedReason) -> None:
        """Ask a gateway that still has the media to have the item encoded; no encoder is making it."""
        if self._pins.state_of(mm_hash) is not EngineItemState.WATCHING:
            return  # no request needs it any more, or it came meanwhile
        for engine_request_id in self._pins.requests_of(mm_hash):
            admission = self._requests[engine_request_id]
            if not admission.has_failed and admission.gateway is not None:
                log.info("encode requested", mm_hash=mm_hash, request_id=admission.request_id, reason=reason)
                self._pins.note_order(mm_hash, engine_request_id)
                self._replies.request_encode(admission, mm_hash, reason)
                return
        self._fail_item(mm_hash, "the item is not in the cache store and no gateway can order it")

    def _fail_item(self, mm_hash: str, why: str) -> None:
        """Fail the requests that wait for the item; requests that came meanwhile are unaffected."""
        item = self._pins.lose_watched(mm_hash)
        if item is not None:
            self._fail_requests_of(item, why)
            self._grant_pending()

    def _fail_requests_of(self, item: EngineItem, why: str) -> None:
        """Fail the requests of a dropped item, which no longer hold it."""
        for engine_request_id in item.needed_by:
            admission = self._requests[engine_request_id]
            self._requests.drop_item(admission, item.mm_hash)
            self._preallocator.deallocate(engine_request_id, item.mm_hash)
            self.fail_admission(admission, why)

    # ---- granting --------------------------------------------------------------------------------
    def _grant_pending(self) -> None:
        """Grant space that was given back to the requests that now have room."""
        for engine_request_id, needs in self._preallocator.take_granted():
            admission = self._requests[engine_request_id]  # a request that waits for space lives
            self._grant_needs(admission, needs)
            self._wake_if_ready(admission)

    def _grant_needs(self, admission: Admission, needs: Iterable[Need]) -> None:
        for need in needs:
            if need.item_index not in admission.asked:
                continue  # the request failed at a place before this one; its end frees the space
            self._requests.grant_place(admission, need.item_index)
            if admission.is_local:
                continue
            self._replies.grant_item(admission, admission.features[need.item_index])
            self._pins.acquire_item(need.mm_hash, admission.engine_request_id)
            if self._pins.num_rows_of(need.mm_hash) not in (None, need.num_embeds):
                why = f"the item has other rows than the {need.num_embeds} that are expected"
                self.fail_admission(admission, why)

    def _wake_if_ready(self, admission: Admission) -> None:
        """Wake a waiting request if it has enough to compute."""
        if not admission.granted:
            return
        readiness = self.readiness(admission, admission.asked_at)
        if readiness is Readiness.WHOLE or (readiness is Readiness.PART and admission.is_waiting):
            self._requests.wake_request(admission)

    def _is_here(self, admission: Admission, feature: Feature) -> bool:
        return admission.is_local or self._pins.is_item_ready(feature.mm_hash)

    def _unused_places(self, admission: Admission, needed: set[int]) -> set[int]:
        """Requested places that the KV cache covers and that the engine does not use."""
        covered = admission.asked - needed
        return {each for each in covered if not self._cache.is_in_use(admission.engine_request_id, each)}

    def _drop_places(self, admission: Admission, item_indexes: set[int]) -> None:
        """Drop places that need no space; `_grant_pending` follows."""
        for item_index in sorted(item_indexes):
            if self._requests.drop_place(admission, item_index):  # the item's last place
                mm_hash = admission.features[item_index].mm_hash
                self._preallocator.deallocate(admission.engine_request_id, mm_hash)
                if not admission.is_local:
                    self._pins.release_item(mm_hash, admission.engine_request_id)
