"""The flights that this encoder works on: which jobs it shall do at all, and their leases in Redis."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from triptych_common.bus import Delivery
from triptych_common.coordination import SingleFlight, StartResult
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeFailed, EncodeJob, FailureKind, Requester
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.jobs.flight import Flight
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.jobs.reporter import Reporter

log = get_logger(__name__)

DEFAULT_DEADLINE_S = 60.0


class JobLeases:
    """`run` must run."""

    def __init__(
        self, inflight: SingleFlight, reporter: Reporter, ledger: Ledger, instance: str, lease_s: float
    ) -> None:
        """`lease_s`: a job that nobody renewed for so long is another encoder's; as on the stream."""
        self._inflight = inflight
        self._reporter = reporter
        self._ledger = ledger
        self._instance = instance
        self._lease_s = lease_s
        self._running: set[Flight] = set()
        self.num_dropped = 0  # jobs that nobody waited for any more
        self.num_superseded = 0  # jobs that another encoder works on, or that another job replaced

    async def start(self, delivery: Delivery, job: EncodeJob) -> Flight | None:
        """The flight of a job that was taken from the stream; None: it shall not be done."""
        requesters = job.requesters
        try:
            start, waiting = await self._inflight.start_job(
                job,
                delivery.entry_id,
                self._instance,
                lease_s=self._lease_s,
                ttl_s=remaining_s(delivery.envelope),
            )
            requesters = waiting or requesters  # a full Redis starts a job that it could not note anybody for
        except BusUnavailableError as error:  # who waits may have changed; the job names who did
            log.warning("flight not started", job_id=job.job_id, error=str(error))
            start = StartResult.STARTED
        if start is StartResult.UNWANTED:
            self.num_dropped += 1
            log.info("job dropped: nobody waits for it", job_id=job.job_id, num_dropped=self.num_dropped)
            return None
        if start is StartResult.SUPERSEDED:
            self.num_superseded += 1
            log.info("job dropped: another one serves", job_id=job.job_id)
            return None
        return Flight(
            self._inflight,
            self._reporter,
            self._ledger,
            job,
            delivery.envelope,
            delivery.entry_id,
            requesters,
        )

    @contextmanager
    def working_on(self, flight: Flight) -> Iterator[None]:
        """Its lease is renewed meanwhile."""
        self._running.add(flight)
        try:
            yield
        finally:
            self._running.discard(flight)

    async def fail(self, flight: Flight, kind: FailureKind, detail: str) -> None:
        """See `Flight.fail`."""
        await flight.fail(kind, detail, self._instance)

    async def give_up(self, job: EncodeJob, envelope: Envelope, reason: str) -> None:
        """Nobody shall try the job again, whoever had it."""
        failure = EncodeFailed(
            job_id=job.job_id,
            mm_hash=job.mm_hash,
            encoder=self._instance,
            kind=FailureKind.DEAD_LETTER,
            detail=reason[:2000],
        )
        waiting: Iterable[Requester] | None = None
        try:
            waiting = await self._inflight.fail_flight(failure, by_owner=False)
        except BusUnavailableError as error:
            log.warning("failure not noted", job_id=job.job_id, error=str(error))
        await self._reporter.failed(failure, envelope, job.requesters if waiting is None else waiting)

    async def run(self) -> None:
        """Renew the leases until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await asyncio.gather(*(each.renew(self._instance, self._lease_s) for each in self._running))


def remaining_s(envelope: Envelope) -> float:
    """Seconds until nobody waits any more."""
    return DEFAULT_DEADLINE_S if envelope.deadline is None else envelope.deadline - time.monotonic()
