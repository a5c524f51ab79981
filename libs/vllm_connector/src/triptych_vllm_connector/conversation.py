"""Conversation about each (request, item) with the encoder that makes it. Pure.

PD decides about an item when it admits the request, the encoder introduces itself with its metadata,
and either may come first. Each word is said once: a `Preallocation` when decision and metadata are
both known, an `ItemAck` when outcome and metadata are both known. An item that nobody encodes (it was
in the store all along) has no metadata, and then nobody is told.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from triptych_common.protocol.messages import Decision, EncoderCacheMetadata, ItemAck, Message, Outcome, Preallocation

Key = tuple[str, int]  # (wire request id, item index)
Reason = Literal["", "prefix_cached", "request_gone", "too_large"]


@dataclass
class _Talk:
    mm_hash: str
    metadata: EncoderCacheMetadata | None = None
    decision: tuple[Decision, Reason] | None = None
    outcome: tuple[Outcome, str] | None = None
    told: list[Message] = field(default_factory=list)


@dataclass(frozen=True)
class Addressed:
    """A message and the encoder that shall get it."""

    encoder: str
    message: Preallocation | ItemAck


class Conversation:
    """Holds at most `capacity` items; the oldest are forgotten, which costs a message, never a tensor."""

    def __init__(self, instance: str, capacity: int = 16384) -> None:
        self._instance = instance
        self._capacity = capacity
        self._talks: OrderedDict[Key, _Talk] = OrderedDict()

    def __len__(self) -> int:
        return len(self._talks)

    def metadata(self, metadata: EncoderCacheMetadata) -> list[Addressed]:
        """An encoder said that it makes this item for these requesters."""
        out: list[Addressed] = []
        for requester in metadata.requesters:
            if requester.prefill_decode != self._instance:
                continue
            talk = self._talk((requester.request_id, requester.item_index), metadata.mm_hash)
            talk.metadata = metadata
            out += self._say((requester.request_id, requester.item_index), talk)
        return out

    def decided(self, key: Key, mm_hash: str, decision: Decision, reason: Reason = "") -> list[Addressed]:
        talk = self._talk(key, mm_hash)
        talk.decision = (decision, reason)
        return self._say(key, talk)

    def ended(self, key: Key, mm_hash: str, outcome: Outcome, detail: str = "") -> list[Addressed]:
        talk = self._talk(key, mm_hash)
        if talk.outcome is None:  # the last word is said once
            talk.outcome = (outcome, detail)
        return self._say(key, talk)

    def _talk(self, key: Key, mm_hash: str) -> _Talk:
        talk = self._talks.get(key)
        if talk is None:
            talk = self._talks[key] = _Talk(mm_hash)
            if len(self._talks) > self._capacity:
                self._talks.popitem(last=False)
        return talk

    def _say(self, key: Key, talk: _Talk) -> list[Addressed]:
        if talk.metadata is None:
            return []
        words: list[Preallocation | ItemAck] = []
        request_id, item_index = key
        if talk.decision is not None:
            words.append(
                Preallocation(
                    request_id=request_id,
                    item_index=item_index,
                    job_id=talk.metadata.job_id,
                    mm_hash=talk.mm_hash,
                    prefill_decode=self._instance,
                    decision=talk.decision[0],
                    reason=talk.decision[1],
                )
            )
        if talk.outcome is not None:
            words.append(
                ItemAck(
                    request_id=request_id,
                    item_index=item_index,
                    job_id=talk.metadata.job_id,
                    mm_hash=talk.mm_hash,
                    prefill_decode=self._instance,
                    outcome=talk.outcome[0],
                    detail=talk.outcome[1][:500],
                )
            )
        new = [word for word in words if word not in talk.told]
        talk.told += new
        return [Addressed(talk.metadata.encoder, word) for word in new]
