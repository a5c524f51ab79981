"""Item replies: messages about requests' items to their encoders and gateways. Pure.

The engine decides about an item when it admits the request, the encoder reports the item with its metadata,
and either may come first. A `Preallocation` is sent when decision and metadata are both known, an `ItemAck`
when outcome and metadata are both known; again only when it changed, or when metadata come again: the job was
delivered twice, or another encoder took it over and knows nothing. An item that no encoder makes (it was in
the store all along) has no metadata, and then nothing is sent.

An item that lies in the store in pieces is one item to its encoder and its gateway: it is granted with the
first piece that is, declined and acked with the last.

Several engine requests can stand for one request of a gateway (`n` > 1). While one of them lives, another
one's end does not count for it: an item is skipped by the last of them.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from triptych_common.protocol.messages import (
    Decision,
    EncodeNeeded,
    EncoderCacheMetadata,
    ItemAck,
    Outcome,
    Preallocation,
    RequesterKey,
)
from triptych_vllm_connector.consumer.admission import Admission, Feature
from triptych_vllm_connector.consumer.ports import MessageSender
from triptych_vllm_connector.consumer.request_table import RequestTable

DeclineReason = Literal["", "prefix_cached", "request_gone", "too_large"]
NeedReason = Literal["absent", "writer_lost", "evicted"]


@dataclass
class _Job:
    """A job of an encoder that makes the item, and the messages sent to that encoder."""

    job_id: str
    encoder: str
    sent_decision: Preallocation | None = None
    sent_ack: ItemAck | None = None


@dataclass
class _Reply:
    """Decision, outcome and jobs of one (request, item)."""

    mm_hash: str
    # By job and encoder. Usually one; more after `EncodeNeeded`, and when a job was taken over: an encoder
    # that was only slow waits for the ack too.
    jobs: dict[tuple[str, str], _Job] = field(default_factory=dict)
    decision: tuple[Decision, DeclineReason] | None = None
    outcome: tuple[Outcome, str] | None = None
    declined: set[int] = field(default_factory=set)  # places of its pieces
    done: set[int] = field(default_factory=set)  # places of its pieces that have an outcome


class ItemReplies:
    """Holds up to `capacity` items; forgetting the oldest costs a message, never a tensor."""

    def __init__(
        self, instance: str, sender: MessageSender, requests: RequestTable, capacity: int = 16384
    ) -> None:
        self._instance = instance
        self._sender = sender
        self._requests = requests
        self._capacity = capacity
        self._replies: OrderedDict[RequesterKey, _Reply] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replies)

    def on_metadata(self, metadata: EncoderCacheMetadata) -> None:
        """Record an encoder that makes this item for these requesters, and send it existing decisions."""
        for requester in metadata.requesters:
            if requester.prefill_decode == self._instance:
                key = (requester.request_id, requester.item_index)
                reply = self._reply_of(key, metadata.mm_hash)
                job = _Job(metadata.job_id, metadata.encoder)
                reply.jobs[job.job_id, job.encoder] = job
                self._send_news(key, reply, None)

    def grant_item(self, admission: Admission, feature: Feature) -> None:
        """Record that the item has space; withdraws an earlier ack, since the item is needed again."""
        self._decide(admission, feature, Decision.GRANTED, "")

    def decline_item(self, admission: Admission, feature: Feature, reason: DeclineReason) -> None:
        """Record that the item is not to be sent; the latest decision counts."""
        if not admission.is_local:
            self._decide(admission, feature, Decision.DECLINED, reason)

    def skip_item(self, admission: Admission, feature: Feature, reason: DeclineReason) -> None:
        """Decline an item that the request does not need, and release its encoder."""
        if not self._requests.has_sibling(admission):
            self.decline_item(admission, feature, reason)
            self.ack_item(admission, feature, Outcome.SKIPPED)

    def ack_item(self, admission: Admission, feature: Feature, outcome: Outcome) -> None:
        """Record that the request is done with the item; the first outcome counts."""
        if admission.is_local:
            return
        key = (admission.request_id, feature.media_index)
        reply = self._reply_of(key, feature.media_hash)
        reply.done.add(feature.item_index)
        if reply.outcome is None and len(reply.done) >= feature.num_pieces:
            detail = (admission.failure or "") if outcome is Outcome.FAILED else ""
            reply.outcome = (outcome, detail[:500])
        self._send_news(key, reply, admission.traceparent)

    def request_encode(self, admission: Admission, mm_hash: str, reason: NeedReason) -> None:
        """Ask the request's gateway, if any, for an encode of an item that no encoder makes."""
        if admission.gateway is None:
            return
        place = admission.places_of(mm_hash)[0]
        message = EncodeNeeded(
            request_id=admission.request_id,
            item_index=place.media_index,
            mm_hash=place.media_hash,
            prefill_decode=self._instance,
            reason=reason,
        )
        self._sender.send_to_gateway(admission.gateway, message, admission.traceparent)

    def _decide(
        self, admission: Admission, feature: Feature, decision: Decision, reason: DeclineReason
    ) -> None:
        key = (admission.request_id, feature.media_index)
        reply = self._reply_of(key, feature.media_hash)
        if decision is Decision.GRANTED:
            reply.outcome = None
            reply.declined.discard(feature.item_index)
            reply.done.discard(feature.item_index)
        else:
            reply.declined.add(feature.item_index)
        if decision is Decision.GRANTED or len(reply.declined) >= feature.num_pieces:
            reply.decision = (decision, reason)
        self._send_news(key, reply, admission.traceparent)

    def _reply_of(self, key: RequesterKey, mm_hash: str) -> _Reply:
        reply = self._replies.get(key)
        if reply is None:
            reply = self._replies[key] = _Reply(mm_hash)
            if len(self._replies) > self._capacity:
                self._replies.popitem(last=False)
        return reply

    def _send_news(self, key: RequesterKey, reply: _Reply, traceparent: str | None) -> None:
        for job in reply.jobs.values():
            decision, ack = self._decision_for(key, reply, job), self._ack_for(key, reply, job)
            if decision is not None and decision != job.sent_decision:
                job.sent_decision = decision
                self._sender.send_to_encoder(job.encoder, decision, traceparent)
            if ack is not None and ack != job.sent_ack:
                job.sent_ack = ack
                self._sender.send_to_encoder(job.encoder, ack, traceparent)

    def _decision_for(self, key: RequesterKey, reply: _Reply, job: _Job) -> Preallocation | None:
        if reply.decision is None:
            return None
        decision, reason = reply.decision
        if decision is Decision.GRANTED and reply.outcome is not None:
            if job.sent_decision is not None:
                return job.sent_decision
            # The encoder comes after the ack: nothing is to be sent any more.
            decision = Decision.DECLINED
            reason = "prefix_cached" if reply.outcome[0] is Outcome.INJECTED else "request_gone"
        return Preallocation(
            request_id=key[0],
            item_index=key[1],
            job_id=job.job_id,
            mm_hash=reply.mm_hash,
            prefill_decode=self._instance,
            decision=decision,
            reason=reason,
        )

    def _ack_for(self, key: RequesterKey, reply: _Reply, job: _Job) -> ItemAck | None:
        if reply.outcome is None:
            return None
        return ItemAck(
            request_id=key[0],
            item_index=key[1],
            job_id=job.job_id,
            mm_hash=reply.mm_hash,
            prefill_decode=self._instance,
            outcome=reply.outcome[0],
            detail=reply.outcome[1],
        )
