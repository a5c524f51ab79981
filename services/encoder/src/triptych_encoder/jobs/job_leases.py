"""Decides which jobs this encoder does, and keeps their leases in Redis."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from triptych_common.bus import Delivery
from triptych_common.coordination import SingleFlight, StartResult
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeFailed, EncodeJob, FailureKind
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.encoding import JobFailure
from triptych_encoder.jobs.active_job import ActiveJob, publish_failure, remaining_s
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.jobs.reporter import Reporter

log = get_logger(__name__)

REFRESH_AFTER_S = 0.1  # an item that waited longer for its encode is encoded only if it is still needed
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

    async def take_job(self, delivery: Delivery, job: EncodeJob, *, is_in_hand: bool) -> ActiveJob | None:
        """Take a job from the stream; None if it is dropped.

        One that an encoder had before is started at once: others may have it, or all requesters have left. So
        is one whose item is in hand here: it would wait for that.
        """
        active = ActiveJob(
            self._single_flight, self._reporter, self._ledger, delivery, job, self._instance, self._lease_s
        )
        if delivery.num_deliveries > 1 or is_in_hand:
            start = await active.start_flight()
            if start is not StartResult.STARTED:
                self.note_refused(job, start)
                return None
        return active

    async def is_still_needed(self, active: ActiveJob, since: float) -> bool:
        """True if a job whose turn has come should be encoded; refreshes its requesters if it waited long.

        False if all requesters have left, which ended its flight; if the flight has ended otherwise; or if an
        encoder works on another entry of the job. A takeover of this very entry is not noticed: the flight is
        started here again. True also when Redis does not answer, or has lost the flight and the entry: the
        requesters, who have the metadata, wait.
        """
        if not await active.wait_for_start(ASK_LIMIT_S):
            log.info("job encoded unasked: Redis did not answer", job_id=active.job.job_id)
            return True
        if active.refusal is None and time.monotonic() - max(active.refreshed_at, since) >= REFRESH_AFTER_S:
            try:
                async with asyncio.timeout(ASK_LIMIT_S):
                    start = await active.start_flight()
            except TimeoutError:
                log.info("job encoded unasked: Redis did not answer", job_id=active.job.job_id)
                return True
            if start not in (StartResult.STARTED, StartResult.GONE):
                active.refusal = start
        return active.refusal is None

    def note_refused(self, job: EncodeJob, start: StartResult) -> None:
        if start is StartResult.SUPERSEDED:
            self.num_superseded += 1
            log.info("job dropped: superseded", job_id=job.job_id)
        else:
            self.num_dropped += 1
            log.info(
                "job dropped: no requester waits for it", job_id=job.job_id, num_dropped=self.num_dropped
            )

    @contextmanager
    def renewing(self, job: ActiveJob) -> Iterator[None]:
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
            self._single_flight, self._reporter, job, failure, envelope, job.requesters, by_owner=False
        )

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await asyncio.gather(*(each.renew_lease() for each in self._renewed))


def check_deadline(envelope: Envelope) -> None:
    """Raise JobFailure if no requester waits any more."""
    if remaining_s(envelope) <= 0:
        raise JobFailure(FailureKind.EXPIRED, "the deadline passed before the item was encoded")
