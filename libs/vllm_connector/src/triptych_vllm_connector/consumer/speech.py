"""What PD's engine says about its requests' items: to their encoders, and to the gateways.

Several engine requests can stand for one request of a gateway (`n` > 1). While one of them lives, another
one's end does not speak for it: an item is declined or skipped by the last of them.
"""

from typing import Literal

from triptych_common.protocol.messages import Decision, EncodeNeeded, EncoderCacheMetadata, Outcome
from triptych_vllm_connector.consumer.admission import Admission, Feature
from triptych_vllm_connector.consumer.item_replies import Addressed, Conversation, Reason
from triptych_vllm_connector.links.links import MessageSender


class Speech:
    """Owns the conversations; turns what happens to requests into messages."""

    def __init__(self, instance: str, talk: MessageSender) -> None:
        self._instance = instance
        self._talk = talk
        self._conversation = Conversation(instance)
        self._engine_ids: dict[str, set[str]] = {}  # by wire id

    def opened(self, admission: Admission) -> None:
        self._engine_ids.setdefault(admission.wire_id, set()).add(admission.engine_id)

    def closed(self, admission: Admission) -> None:
        engine_ids = self._engine_ids.get(admission.wire_id, set())
        engine_ids.discard(admission.engine_id)
        if not engine_ids:
            self._engine_ids.pop(admission.wire_id, None)

    def metadata(self, metadata: EncoderCacheMetadata) -> None:
        """An encoder introduced itself."""
        self._say(self._conversation.metadata(metadata), None)

    def granted(self, admission: Admission, feature: Feature) -> None:
        key = (admission.wire_id, feature.item_index)
        self._say(self._conversation.decided(key, feature.mm_hash, Decision.GRANTED), admission)

    def unused(self, admission: Admission, feature: Feature, reason: Reason) -> None:
        """The request does not need it, for now or for ever."""
        if self._engine_ids.get(admission.wire_id, set()) - {admission.engine_id}:
            return
        self.declined(admission, feature, reason)
        self._ended(admission, feature, Outcome.SKIPPED)

    def declined(self, admission: Admission, feature: Feature, reason: Reason) -> None:
        if admission.is_local:
            return
        key = (admission.wire_id, feature.item_index)
        self._say(self._conversation.decided(key, feature.mm_hash, Decision.DECLINED, reason), admission)

    def injected(self, admission: Admission, feature: Feature) -> None:
        self._ended(admission, feature, Outcome.INJECTED)

    def failed(self, admission: Admission, feature: Feature) -> None:
        self._ended(admission, feature, Outcome.FAILED, admission.failure or "")

    def encode_needed(
        self, admission: Admission, mm_hash: str, reason: Literal["absent", "writer_lost", "evicted"]
    ) -> None:
        """To the request's gateway, if it has one: nobody makes this item."""
        if admission.gateway is None:
            return
        message = EncodeNeeded(
            request_id=admission.wire_id,
            item_index=next(f.item_index for f in admission.features if f.mm_hash == mm_hash),
            mm_hash=mm_hash,
            prefill_decode=self._instance,
            reason=reason,
        )
        self._talk.to_gateway(admission.gateway, message, admission.traceparent)

    def _ended(self, admission: Admission, feature: Feature, outcome: Outcome, detail: str = "") -> None:
        if admission.is_local:
            return
        key = (admission.wire_id, feature.item_index)
        self._say(self._conversation.ended(key, feature.mm_hash, outcome, detail), admission)

    def _say(self, words: list[Addressed], admission: Admission | None) -> None:
        for word in words:
            self._talk.to_encoder(word.encoder, word.message, admission.traceparent if admission else None)
