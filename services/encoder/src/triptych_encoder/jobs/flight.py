"""One job at this encoder: for whom it works, and what they have been told.

    started --announce--> those who wait then --complete--> those who joined since, then the end of the flight
                                             `--fail------> everybody who waits

Who waits is asked of Redis just before anything is said. Without Redis it is whoever was known last: the
messages wait for Redis themselves, and a flight that outlives its job is mended by those who wait.
"""

from collections.abc import Iterable

from triptych_common.coordination import SingleFlight
from triptych_common.coordination.single_flight import RequesterKey, requester_key
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import (
    EncodeFailed,
    EncodeJob,
    EncoderCacheMetadata,
    FailureKind,
    Requester,
)
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.jobs.reporter import Reporter

log = get_logger(__name__)

MAX_ROUNDS = 5  # of late joiners; they see the sealed metadata, so none of them waits in vain


class Flight:
    """Raises nothing: what cannot be told until the job's deadline is given up; nobody waits for it then."""

    def __init__(
        self,
        inflight: SingleFlight,
        reporter: Reporter,
        ledger: Ledger,
        job: EncodeJob,
        envelope: Envelope,
        entry_id: str,
        requesters: Iterable[Requester],
    ) -> None:
        self._inflight = inflight
        self._reporter = reporter
        self._ledger = ledger
        self.job = job
        self.envelope = envelope
        self.entry_id = entry_id
        self._waiting = {requester_key(each): each for each in requesters}
        self._told: dict[RequesterKey, Requester] = {}

    @property
    def keys(self) -> set[RequesterKey]:
        """Everybody this flight ever worked for."""
        return {*self._waiting, *self._told}

    async def announce(self, metadata: EncoderCacheMetadata, deadline: float) -> None:
        """Tell `metadata` to those who wait and have not heard it.

        `deadline`: monotonic seconds until which their last words are waited for.
        """
        await self._look(metadata)
        new = [requester for key, requester in self._waiting.items() if key not in self._told]
        if not new:
            return
        self._ledger.add(self.job.mm_hash, {requester_key(each) for each in new}, deadline)
        await self._reporter.metadata(metadata.model_copy(update={"requesters": tuple(new)}), self.envelope)
        self._told.update({requester_key(each): each for each in new})

    async def complete(
        self, metadata: EncoderCacheMetadata, deadline: float, encode_s: float
    ) -> set[RequesterKey]:
        """The entry is sealed: tell everybody, and end the flight.

        Returns:
            Those who left before they could want it.
        """
        metadata = metadata.model_copy(update={"sealed": True})
        await self.announce(metadata, deadline)
        left = self._told.keys() - self._waiting.keys()
        heard: set[RequesterKey] = set()
        for _ in range(MAX_ROUNDS):
            new = [requester for key, requester in self._told.items() if key not in heard | left]
            await self._reporter.completed(self.job, self.envelope, encode_s, new)
            heard |= {requester_key(each) for each in new}
            if await self._has_ended(self._told):
                break
            await self.announce(metadata, deadline)
        return left

    async def fail(self, kind: FailureKind, detail: str, encoder: str) -> None:
        """The job produces nothing: tell everybody, unless another encoder works on it by now."""
        failure = EncodeFailed(
            job_id=self.job.job_id,
            mm_hash=self.job.mm_hash,
            encoder=encoder,
            kind=kind,
            detail=detail[:2000],
        )
        waiting: Iterable[Requester] | None = None
        try:
            waiting = await self._inflight.fail_flight(failure)
        except BusUnavailableError as error:
            log.warning("failure not noted", job_id=self.job.job_id, error=str(error))
        if waiting is None:
            waiting = (self._told | self._waiting).values()
        await self._reporter.failed(failure, self.envelope, waiting)

    async def renew(self, encoder: str, lease_s: float) -> None:
        """We still work on it."""
        try:
            await self._inflight.renew_job(
                self.job.mm_hash, self.job.job_id, self.entry_id, encoder, lease_s=lease_s
            )
        except BusUnavailableError as error:
            log.warning("flight not renewed", job_id=self.job.job_id, error=str(error))

    async def _look(self, metadata: EncoderCacheMetadata) -> None:
        try:
            waiting = await self._inflight.announce_metadata(metadata)
        except BusUnavailableError as error:
            log.warning("subscribers not known anew", job_id=self.job.job_id, error=str(error))
            return
        if waiting is not None:
            self._waiting = {requester_key(each): each for each in waiting}

    async def _has_ended(self, told: Iterable[RequesterKey]) -> bool:
        try:
            is_ended, _ = await self._inflight.finish_flight(self.job.mm_hash, self.job.job_id, told)
        except BusUnavailableError as error:
            log.warning("flight not ended", job_id=self.job.job_id, error=str(error))
            return True
        return is_ended
