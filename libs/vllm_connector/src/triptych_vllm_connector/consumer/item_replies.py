"""Conversation about each (request, item) with the encoder that makes it. Pure.

PD decides about an item when it admits the request, the encoder introduces itself with its metadata,
and either may come first. A `Preallocation` is said when decision and metadata are both known, an
`ItemAck` when outcome and metadata are both known; again only when it changed, or when metadata come
again: the job was delivered twice, or another encoder took it over and knows nothing. An item that nobody
encodes (it was in the store all along) has no metadata, and then nobody is told.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from triptych_common.protocol.messages import Decision, EncoderCacheMetadata, ItemAck, Outcome, Preallocation

Key = tuple[str, int]  # (wire request id, item index)
Reason = Literal["", "prefix_cached", "request_gone", "too_large"]


@dataclass
class _Job:
    """A job, at an encoder that makes the item; and what the encoder was told."""

    job_id: str
    encoder: str
    told_decision: Preallocation | None = None
    told_outcome: ItemAck | None = None


@dataclass
class _Talk:
    mm_hash: str
    # By job and encoder. Usually one; more after `EncodeNeeded`, and when a job was taken over: an encoder
    # that was only slow waits for the last word too.
    jobs: dict[tuple[str, str], _Job] = field(default_factory=dict)
    decision: tuple[Decision, Reason] | None = None
    outcome: tuple[Outcome, str] | None = None


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
            job = _Job(metadata.job_id, metadata.encoder)
            talk.jobs[job.job_id, job.encoder] = job
            out += self._say((requester.request_id, requester.item_index), talk)
        return out

    def decided(self, key: Key, mm_hash: str, decision: Decision, reason: Reason = "") -> list[Addressed]:
        """The latest decision counts. One that grants takes back an earlier last word: it is needed again."""
        talk = self._talk(key, mm_hash)
        talk.decision = (decision, reason)
        if decision is Decision.GRANTED:
            talk.outcome = None
        return self._say(key, talk)

    def ended(self, key: Key, mm_hash: str, outcome: Outcome, detail: str = "") -> list[Addressed]:
        """The first last word counts."""
        talk = self._talk(key, mm_hash)
        if talk.outcome is None:
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
        words: list[Addressed] = []
        for job in talk.jobs.values():
            decision, outcome = self._decision(key, talk, job), self._outcome(key, talk, job.job_id)
            if decision is not None and decision != job.told_decision:
                job.told_decision = decision
                words.append(Addressed(job.encoder, decision))
            if outcome is not None and outcome != job.told_outcome:
                job.told_outcome = outcome
                words.append(Addressed(job.encoder, outcome))
        return words

    def _decision(self, key: Key, talk: _Talk, job: _Job) -> Preallocation | None:
        if talk.decision is None:
            return None
        decision, reason = talk.decision
        if decision is Decision.GRANTED and talk.outcome is not None:
            if job.told_decision is not None:
                return job.told_decision
            # It comes after the last word: nothing is to be sent any more.
            decision = Decision.DECLINED
            reason = "prefix_cached" if talk.outcome[0] is Outcome.INJECTED else "request_gone"
        return Preallocation(
            request_id=key[0],
            item_index=key[1],
            job_id=job.job_id,
            mm_hash=talk.mm_hash,
            prefill_decode=self._instance,
            decision=decision,
            reason=reason,
        )

    def _outcome(self, key: Key, talk: _Talk, job_id: str) -> ItemAck | None:
        if talk.outcome is None:
            return None
        return ItemAck(
            request_id=key[0],
            item_index=key[1],
            job_id=job_id,
            mm_hash=talk.mm_hash,
            prefill_decode=self._instance,
            outcome=talk.outcome[0],
            detail=talk.outcome[1][:500],
        )
