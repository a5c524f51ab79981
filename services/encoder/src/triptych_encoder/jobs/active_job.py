"""State of one job at this encoder, its requesters, and the messages sent to them.

    STARTED -> PREPROCESSED -> RESERVED -> ENCODING -> SEALED -> COMPLETED
       |            |              |  `----------------^ |  (the entry was there already)
       |            |              |          |          |
       `------------`--------------`----------`--------> |  FAILED (from the first four: one EncodeFailed)
       `------------`--------------`----------`----------`> HANDED_BACK (cancelled: another encoder's)
                    `--------------`--> DROPPED (nobody waits for it any more, or another encoder has it)

Its flight is started with the first announcement: a job that is new on the stream has requesters. One that an
encoder had before, or whose item is in hand here, is started when it is taken; dropped then, it never gets
here.
One whose engine dies stays as it is: the process ends, and another encoder takes the job over.

The encoder asks Redis for the requesters just before it sends anything. Without Redis it uses those that it
knew last: the messages wait for Redis themselves, and the requesters mend a flight that outlives its job.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable
from enum import Enum

from triptych_common.bus import Delivery
from triptych_common.coordination import SingleFlight, StartResult
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.domain.transitions import check_transition
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import (
    EncodeFailed,
    EncodeJob,
    EncoderCacheMetadata,
    FailureKind,
    Requester,
    RequesterKey,
    requester_key,
)
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.jobs.reporter import Reporter

log = get_logger(__name__)

DEFAULT_DEADLINE_S = 60.0
MAX_ROUNDS = 5  # of late joiners; they see the sealed metadata, so none of them waits in vain


class JobState(Enum):
    STARTED = "started"  # the media are fetched and preprocessed
    PREPROCESSED = "preprocessed"  # its size is known; the store is asked for space
    RESERVED = "reserved"  # blocks are held, or the entry is there; the item is announced
    ENCODING = "encoding"  # inside vLLM, and until the seal
    SEALED = "sealed"  # and pinned for the requesters
    COMPLETED = "completed"  # and reported
    FAILED = "failed"  # and reported
    HANDED_BACK = "handed back"  # to the stream, for another encoder
    DROPPED = "dropped"  # while it waited for its encode: it is not needed here any more


_ENDS = frozenset({JobState.FAILED, JobState.HANDED_BACK})

ALLOWED: dict[JobState, frozenset[JobState]] = {
    JobState.STARTED: _ENDS | {JobState.PREPROCESSED},
    JobState.PREPROCESSED: _ENDS | {JobState.RESERVED, JobState.DROPPED},
    JobState.RESERVED: _ENDS | {JobState.ENCODING, JobState.SEALED, JobState.DROPPED},
    JobState.ENCODING: _ENDS | {JobState.SEALED},
    JobState.SEALED: frozenset({JobState.COMPLETED, JobState.HANDED_BACK}),
    JobState.COMPLETED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.HANDED_BACK: frozenset(),
    JobState.DROPPED: frozenset(),
}


class ActiveJob:
    """One job; only `enter` assigns `state`. Messages still unsent at the job's deadline are dropped."""

    def __init__(
        self,
        single_flight: SingleFlight,
        reporter: Reporter,
        ledger: Ledger,
        delivery: Delivery,
        job: EncodeJob,
        encoder: str,
        lease_s: float,
    ) -> None:
        """`lease_s`: a job not renewed by `encoder` for this long passes to another encoder."""
        self._single_flight = single_flight
        self._encoder = encoder
        self._lease_s = lease_s
        self._reporter = reporter
        self._ledger = ledger
        self.state = JobState.STARTED
        self.job = job
        self.envelope = delivery.envelope
        self.entry_id, self.stream = delivery.entry_id, delivery.stream
        self._waiting = {requester_key(each): each for each in job.requesters}
        self.refreshed_at = time.monotonic()  # when Redis was last asked for them
        self._has_started = False  # its flight runs here
        self._is_answered = asyncio.Event()  # the first start, or Redis is away
        self.refusal: StartResult | None = None  # why it is not to be done
        self._informed: dict[RequesterKey, Requester] = {}  # have the metadata

    def enter(self, state: JobState) -> None:
        """Move to `state`; raises IllegalTransitionError if it cannot follow."""
        check_transition(ALLOWED, f"job {self.job.job_id}", self.state, state)
        self.state = state

    @property
    def has_blocks(self) -> bool:
        """True if the job will soon be done here; before that another encoder may take it."""
        return self.state not in (JobState.STARTED, JobState.PREPROCESSED)

    @property
    def waiting(self) -> frozenset[RequesterKey]:
        return frozenset(self._waiting)

    @property
    def keys(self) -> set[RequesterKey]:
        return {*self._waiting, *self._informed}

    def set_waiting(self, requesters: Iterable[Requester]) -> None:
        self._waiting = {requester_key(each): each for each in requesters}
        self.refreshed_at = time.monotonic()

    async def start_flight(self, metadata: EncoderCacheMetadata | None = None) -> StartResult:
        """Start the job in Redis, with its item's `metadata` if they are known; updates those that wait.

        Without Redis the job is started: the requesters may have changed; those known are the first.
        """
        try:
            start, requesters = await self._single_flight.start_job(
                self.job,
                self.entry_id,
                self._encoder,
                lease_s=self._lease_s,
                ttl_s=remaining_s(self.envelope),
                stream=self.stream,
                metadata=metadata,
            )
        except BusUnavailableError as error:
            log.warning("job started without its flight", job_id=self.job.job_id, error=str(error))
            return StartResult.STARTED
        finally:
            self._is_answered.set()
        if start is StartResult.STARTED:
            self._has_started = True
        if requesters:  # a full Redis records none
            self.set_waiting(requesters)
        return start

    async def wait_for_start(self, limit_s: float) -> bool:
        """Return whether Redis has answered the first start; wait for it, `limit_s` at most."""
        if not self._is_answered.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._is_answered.wait()
        return self._is_answered.is_set()

    async def inform_requesters(self, metadata: EncoderCacheMetadata, deadline: float) -> None:
        """Send `metadata` to the requesters that do not have it.

        `deadline` limits the wait for their final acks, in monotonic seconds. Sends nothing if the job is
        refused.
        """
        await self._refresh_requesters(metadata)
        if self.refusal is not None:
            return
        new = [requester for key, requester in self._waiting.items() if key not in self._informed]
        if not new:
            return
        self._ledger.add_requesters(self.job.mm_hash, {requester_key(each) for each in new}, deadline)
        await self._reporter.send_metadata(
            metadata.model_copy(update={"requesters": tuple(new)}), self.envelope
        )
        self._informed.update({requester_key(each): each for each in new})

    async def report_completed(
        self, metadata: EncoderCacheMetadata, deadline: float, encode_s: float
    ) -> set[RequesterKey]:
        """Report the sealed entry to all requesters, and end the flight.

        Gateways of requesters that left are informed, too: a short answer may have ended since the seal.

        Returns:
            The requesters that left: they will not ack.
        """
        metadata = metadata.model_copy(update={"sealed": True})
        reported: set[RequesterKey] = set()
        for _ in range(0 if self.refusal else MAX_ROUNDS):  # refused: none knows of this job
            new = [requester for key, requester in self._informed.items() if key not in reported]
            await self._reporter.send_completed(self.job, self.envelope, encode_s, new)
            reported |= {requester_key(each) for each in new}
            if await self._end_flight(metadata) and self._waiting.keys() <= self._informed.keys():
                break
            await self.inform_requesters(metadata, deadline)
        self.enter(JobState.COMPLETED)
        return self._informed.keys() - self._waiting.keys()

    async def report_failed(self, kind: FailureKind, detail: str) -> None:
        """Report the failure to all requesters, unless another encoder works on the job.

        One that has not begun here is begun first: the flight may name an encoder that handed the job back.
        """
        if not self._has_started:
            await self.start_flight()
        failure = EncodeFailed(
            job_id=self.job.job_id,
            mm_hash=self.job.mm_hash,
            encoder=self._encoder,
            kind=kind,
            detail=detail[:2000],
        )
        known = (self._informed | self._waiting).values()
        await publish_failure(self._single_flight, self._reporter, self.job, failure, self.envelope, known)
        self.enter(JobState.FAILED)

    async def renew_lease(self) -> None:
        try:
            await self._single_flight.renew_job(
                self.job.mm_hash,
                self.job.job_id,
                self.entry_id,
                self._encoder,
                namespace_digest=self.job.namespace_digest,
                lease_s=self._lease_s,
                stream=self.stream,
            )
        except BusUnavailableError as error:
            log.warning("job lease not renewed", job_id=self.job.job_id, error=str(error))

    async def _refresh_requesters(self, metadata: EncoderCacheMetadata) -> None:
        if not self._has_started:
            start = await self.start_flight(metadata)
            if start is not StartResult.STARTED:
                self.refusal = start
            return
        try:
            waiting = await self._single_flight.announce_metadata(
                metadata, namespace_digest=self.job.namespace_digest
            )
        except BusUnavailableError as error:
            log.warning("requesters not refreshed", job_id=self.job.job_id, error=str(error))
            return
        if waiting is not None:
            self.set_waiting(waiting)

    async def _end_flight(self, metadata: EncoderCacheMetadata) -> bool:
        """End the flight unless requesters have joined that were not informed; updates those that wait."""
        try:
            is_ended, waiting = await self._single_flight.finish_flight(
                metadata, self._informed, namespace_digest=self.job.namespace_digest
            )
        except BusUnavailableError as error:
            log.warning("flight not ended", job_id=self.job.job_id, error=str(error))
            return True
        if waiting is not None:
            self.set_waiting(waiting)
        return is_ended


def remaining_s(envelope: Envelope) -> float:
    """Seconds until no requester waits any more."""
    return DEFAULT_DEADLINE_S if envelope.deadline is None else envelope.deadline - time.monotonic()


async def publish_failure(
    single_flight: SingleFlight,
    reporter: Reporter,
    job: EncodeJob,
    failure: EncodeFailed,
    envelope: Envelope,
    known: Iterable[Requester],
    *,
    by_owner: bool = True,
) -> None:
    """Publish a failure to all requesters, or to `known` without Redis.

    With `by_owner`, nothing is published if another encoder works on the job.
    """
    waiting: Iterable[Requester] | None = None
    try:
        waiting = await single_flight.fail_flight(
            failure, namespace_digest=job.namespace_digest, by_owner=by_owner
        )
    except BusUnavailableError as error:
        log.warning("failed job not recorded in its flight", job_id=failure.job_id, error=str(error))
    await reporter.send_failed(failure, envelope, known if waiting is None else waiting)
