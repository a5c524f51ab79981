"""Decides which jobs this encoder does, and keeps their leases in Redis."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from triptych_common.bus import Delivery
from triptych_common.coordination import SingleFlight, StartResult
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeFailed, EncodeJob, FailureKind, Requester
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.encoding import JobFailure
from triptych_encoder.jobs.active_job import ActiveJob, publish_failure
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.jobs.reporter import Reporter

log = get_logger(__name__)

DEFAULT_DEADLINE_S = 60.0
ASK_LIMIT_S = 0.3  # for whether an item is still needed: vLLM waits for the answer


class JobLeases:
    """Leases of the jobs in hand, which `run` renews."""

    def __init__(
        self, single_flight: SingleFlight, reporter: Reporter, ledger: Ledger, instance: str, lease_s: float
    ) -> None:
        """`lease_s`: a job not renewed for this long passes to another encoder, as on the stream."""
        self._single_flight = single_flight
        self._reporter = reporter
        self._ledger = ledger
        self._instance = instance
        self._lease_s = lease_s
        self._renewed: dict[ActiveJob, None] = {}
        self.num_dropped = 0  # jobs that no requester waited for any more
        self.num_superseded = 0  # jobs that another encoder works on, or that another job replaced

    async def take_job(self, delivery: Delivery, job: EncodeJob) -> ActiveJob | None:
        """Start a job from the stream; None if it is dropped."""
        start, requesters = await self._start_job(job, delivery.entry_id, delivery.stream, delivery.envelope)
        if not self._is_to_be_done(job, StartResult.UNWANTED if start is StartResult.GONE else start):
            return None
        return ActiveJob(
            self._single_flight, self._reporter, self._ledger, delivery, job, requesters or job.requesters
        )

    async def is_still_needed(self, active: ActiveJob) -> bool:
        """True if a job that has waited for its encode should be encoded now; refreshes its requesters.

        False if all requesters have left, which ended its flight; if the flight has ended otherwise; or if an
        encoder works on another entry of the job. A takeover of this very entry is not noticed: the flight is
        started here again. True also when Redis does not answer, or has lost the flight and the entry: the
        requesters, who have the metadata, wait.
        """
        try:
            async with asyncio.timeout(ASK_LIMIT_S):
                start, requesters = await self._start_job(
                    active.job, active.entry_id, active.stream, active.envelope
                )
        except TimeoutError:
            log.info("job encoded unasked: Redis did not answer", job_id=active.job.job_id)
            return True
        if requesters:
            active.set_waiting(requesters)
        return start is StartResult.GONE or self._is_to_be_done(active.job, start)

    async def _start_job(
        self, job: EncodeJob, entry_id: str, stream: str, envelope: Envelope
    ) -> tuple[StartResult, tuple[Requester, ...]]:
        """Start the job in Redis; requesters are empty if unknown. A full Redis records none."""
        try:
            return await self._single_flight.start_job(
                job,
                entry_id,
                self._instance,
                lease_s=self._lease_s,
                ttl_s=remaining_s(envelope),
                stream=stream,
            )
        except BusUnavailableError as error:  # the requesters may have changed; those known are the first
            log.warning("job started without its flight", job_id=job.job_id, error=str(error))
            return StartResult.STARTED, ()

    def _is_to_be_done(self, job: EncodeJob, start: StartResult) -> bool:
        if start is StartResult.UNWANTED:
            self.num_dropped += 1
            log.info(
                "job dropped: no requester waits for it", job_id=job.job_id, num_dropped=self.num_dropped
            )
        elif start is StartResult.SUPERSEDED:
            self.num_superseded += 1
            log.info("job dropped: superseded", job_id=job.job_id)
        return start is StartResult.STARTED

    @contextmanager
    def renewing(self, job: ActiveJob) -> Iterator[None]:
        """Renew the job's lease during the block."""
        self._renewed[job] = None
        try:
            yield
        finally:
            self._renewed.pop(job, None)

    async def fail_dead_letter(self, job: EncodeJob, envelope: Envelope, reason: str) -> None:
        """Report to the requesters that no encoder will try the job again."""
        failure = EncodeFailed(
            job_id=job.job_id,
            mm_hash=job.mm_hash,
            encoder=self._instance,
            kind=FailureKind.DEAD_LETTER,
            detail=reason[:2000],
        )
        await publish_failure(
            self._single_flight, self._reporter, failure, envelope, job.requesters, by_owner=False
        )

    async def run(self) -> None:
        """Renew the leases until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await asyncio.gather(*(each.renew_lease(self._instance, self._lease_s) for each in self._renewed))


def check_deadline(envelope: Envelope) -> None:
    """Raise JobFailure if no requester waits any more."""
    if remaining_s(envelope) <= 0:
        raise JobFailure(FailureKind.EXPIRED, "the deadline passed before the item was encoded")


def remaining_s(envelope: Envelope) -> float:
    """Seconds until no requester waits any more."""
    return DEFAULT_DEADLINE_S if envelope.deadline is None else envelope.deadline - time.monotonic()
