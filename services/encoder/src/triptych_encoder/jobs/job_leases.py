"""Which jobs this encoder does at all, and the leases of those that it works on, in Redis."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from triptych_common.bus import Delivery
from triptych_common.coordination import SingleFlight, StartResult
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeFailed, EncodeJob, FailureKind
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.jobs.active_job import ActiveJob, publish_failure
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.jobs.reporter import Reporter

log = get_logger(__name__)

DEFAULT_DEADLINE_S = 60.0


class JobLeases:
    """`run` must run."""

    def __init__(
        self, single_flight: SingleFlight, reporter: Reporter, ledger: Ledger, instance: str, lease_s: float
    ) -> None:
        """`lease_s`: a job that was not renewed for so long is another encoder's; as on the stream."""
        self._single_flight = single_flight
        self._reporter = reporter
        self._ledger = ledger
        self._instance = instance
        self._lease_s = lease_s
        self._renewed: set[ActiveJob] = set()
        self.num_dropped = 0  # jobs that no requester waited for any more
        self.num_superseded = 0  # jobs that another encoder works on, or that another job replaced

    async def take_job(self, delivery: Delivery, job: EncodeJob) -> ActiveJob | None:
        """A job that was taken from the stream; None: it is dropped."""
        requesters = job.requesters
        try:
            start, waiting = await self._single_flight.start_job(
                job,
                delivery.entry_id,
                self._instance,
                lease_s=self._lease_s,
                ttl_s=remaining_s(delivery.envelope),
            )
            requesters = waiting or requesters  # a full Redis starts a job without recording any
        except BusUnavailableError as error:  # the requesters may have changed; the job names the first
            log.warning("job started without its flight", job_id=job.job_id, error=str(error))
            start = StartResult.STARTED
        if start is StartResult.UNWANTED:
            self.num_dropped += 1
            log.info(
                "job dropped: no requester waits for it", job_id=job.job_id, num_dropped=self.num_dropped
            )
            return None
        if start is StartResult.SUPERSEDED:
            self.num_superseded += 1
            log.info("job dropped: superseded", job_id=job.job_id)
            return None
        return ActiveJob(self._single_flight, self._reporter, self._ledger, delivery, job, requesters)

    @contextmanager
    def renewing(self, job: ActiveJob) -> Iterator[None]:
        """Its lease is renewed meanwhile."""
        self._renewed.add(job)
        try:
            yield
        finally:
            self._renewed.discard(job)

    async def fail_dead_letter(self, job: EncodeJob, envelope: Envelope, reason: str) -> None:
        """No encoder will try the job again, whichever had it: report that to the requesters."""
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


def remaining_s(envelope: Envelope) -> float:
    """Seconds until no requester waits any more."""
    return DEFAULT_DEADLINE_S if envelope.deadline is None else envelope.deadline - time.monotonic()
