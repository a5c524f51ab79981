"""FAKE of `coordination.SingleFlight`: the flights in plain Python, over any streams of jobs.

It is no second model of the protocol: it is the Redis of `protocol_world`, of whose scripts Python cannot run
the text. That both answer alike is the test of a machine of its own (`test_flight_machine.py`), which draws
calls that no gateway and no encoder makes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from triptych_common.coordination.single_flight import (
    ALLOWED,
    FINISHED_S,
    MAX_SENDS,
    PUBLISH_LEASE_S,
    Backlog,
    ClaimMode,
    ClaimResult,
    FlightClaim,
    FlightState,
    JobOffer,
    StartResult,
)
from triptych_common.domain.transitions import check_transition
from triptych_common.protocol.ids import JobId
from triptych_common.protocol.messages import (
    EncodeFailed,
    EncodeJob,
    EncoderCacheMetadata,
    Requester,
    RequesterKey,
    requester_key,
)
from triptych_common.protocol.names import DEFAULT_STORE, StreamNames

OVER = -1.0  # a lease that has ended, at any time


@dataclass
class Flight:
    """One hash. Times in seconds, on the clock of its `FlightModel`."""

    job_id: str
    attempt: int
    state: FlightState | None = None  # assigned by `become` alone
    until: float = OVER  # of the claim's or the encoder's lease
    expires_at: float = 0.0  # when Redis forgets all of it
    entry_id: str = ""
    stream: str = ""  # on which that entry is
    encoder: str = ""
    num_sent: int = 0
    metadata: EncoderCacheMetadata | None = None
    failure: EncodeFailed | None = None
    requesters: dict[RequesterKey, Requester] = field(default_factory=dict)
    ends: dict[RequesterKey, float] = field(default_factory=dict)  # until when each of them waits

    def become(self, to: FlightState) -> None:
        check_transition(ALLOWED, f"flight of {self.job_id}", self.state, to)
        self.state = to

    def add_requesters(self, requesters: Iterable[Requester], until: float) -> None:
        for each in requesters:
            self.requesters[requester_key(each)], self.ends[requester_key(each)] = each, until

    def remove_requesters(self, keys: Iterable[RequesterKey]) -> None:
        for key in keys:
            self.requesters.pop(key, None)
            self.ends.pop(key, None)

    def waiting(self) -> tuple[Requester, ...]:
        return tuple(self.requesters[key] for key in sorted(self.requesters))


class Jobs(Protocol):
    """The streams of an item's namespace, as the scripts use them. No two of them have an entry of one id."""

    def append(self, job: EncodeJob, stream: str, *, remaining_ms: int | None, blob: bytes | None) -> str:
        """Returns the entry's id."""
        ...

    def has(self, entry_id: str) -> bool:
        """Does it stand on its stream?"""
        ...

    def is_awaited(self, entry_id: str) -> bool:
        """Will an encoder still get it: is it new, or delivered and not acked?"""
        ...

    def remove(self, entry_id: str) -> None:
        """Acked and deleted."""
        ...

    def num_entries(self, stream: str) -> int: ...


class JobsModel:
    """`Jobs` by themselves. `stream` holds those that stand on it, by entry id."""

    def __init__(self) -> None:
        self.stream: dict[str, EncodeJob] = {}
        self.stream_of: dict[str, str] = {}  # by entry, also of those that are gone
        self.pending: set[str] = set()  # delivered, not acked
        self.last_delivered = Counter[str]()  # by stream, as its group remembers it
        self._num_entries = 0

    def append(
        self, job: EncodeJob, stream: str, *, remaining_ms: int | None = None, blob: bytes | None = None
    ) -> str:
        self._num_entries += 1
        entry_id = f"1-{self._num_entries}"
        self.stream[entry_id], self.stream_of[entry_id] = job, stream
        return entry_id

    def has(self, entry_id: str) -> bool:
        return entry_id in self.stream

    def is_awaited(self, entry_id: str) -> bool:
        is_empty = not self.num_entries(self._stream_of(entry_id))
        return not is_empty and (self.is_new(entry_id) or entry_id in self.pending)

    def remove(self, entry_id: str) -> None:
        self.pending.discard(entry_id)
        self.stream.pop(entry_id, None)

    def num_entries(self, stream: str) -> int:
        return sum(self._stream_of(each) == stream for each in self.stream)

    def _stream_of(self, entry_id: str) -> str:
        return self.stream_of.get(entry_id, "")

    def deliver(self, entry_id: str) -> EncodeJob:
        """To some encoder."""
        self.pending.add(entry_id)
        stream = self._stream_of(entry_id)
        self.last_delivered[stream] = max(self.last_delivered[stream], _number(entry_id))
        return self.stream[entry_id]

    def is_new(self, entry_id: str) -> bool:
        """No encoder had it yet."""
        return _number(entry_id) > self.last_delivered[self._stream_of(entry_id)]

    def lose(self) -> None:
        """Redis comes back empty."""
        self.stream.clear()
        self.pending.clear()
        self.last_delivered.clear()


class FlightModel:
    """Same methods, same answers. Without a clock, leases end when `end_leases` is called."""

    _names = StreamNames("test")

    def __init__(self, jobs: Jobs, now: Callable[[], float] = lambda: 0.0) -> None:
        self.flights: dict[str, Flight] = {}
        self._jobs = jobs
        self._now = now

    def end_leases(self) -> None:
        for flight in self.flights.values():
            flight.until = OVER

    def find(self, mm_hash: str) -> Flight | None:
        """The flight, unless Redis has forgotten it, with the requesters that still wait."""
        flight, now = self.flights.get(mm_hash), self._now()
        if flight is not None and now >= flight.expires_at:
            del self.flights[mm_hash]
            return None
        if flight is not None:
            flight.remove_requesters([key for key, until in flight.ends.items() if until < now])
        return flight

    # ---- SingleFlight ----
    async def claim_flight(
        self,
        mm_hash: str,
        requesters: Iterable[Requester],
        *,
        namespace_digest: str,
        mode: ClaimMode,
        job_id: str,
        attempt: int,
        max_attempts: int,
        ttl_s: float,
        stores: Sequence[str] = (DEFAULT_STORE,),
        has_encoders: bool = True,
        with_backlog: bool = False,
        offer: JobOffer | None = None,
    ) -> FlightClaim:
        streams = {each: self._names.encode_jobs(namespace_digest, each) for each in stores}
        flight = self.find(mm_hash)
        is_stranded = has_encoders and flight is not None and flight.stream not in ("", *streams.values())
        claim = self._claim(mm_hash, requesters, mode, job_id, attempt, max_attempts, ttl_s, is_stranded)
        if claim.result is not ClaimResult.OWNER:
            return claim
        if with_backlog:
            found = {each: Backlog(self._jobs.num_entries(stream), 0.0) for each, stream in streams.items()}
            claim = replace(claim, backlogs=found)
        if offer is None or (claim.job_id, claim.attempt) != (job_id, attempt):
            return claim
        return replace(claim, entry_id=await self.publish_job(offer) or "")

    def _claim(
        self,
        mm_hash: str,
        requesters: Iterable[Requester],
        mode: ClaimMode,
        job_id: str,
        attempt: int,
        max_attempts: int,
        ttl_s: float,
        is_stranded: bool,
    ) -> FlightClaim:
        flight, requesters = self.find(mm_hash), tuple(requesters)
        if flight is None:
            flight = self.flights[mm_hash] = Flight(job_id, attempt)
            return self._own(flight, job_id, attempt, requesters, ttl_s)
        if flight.state is FlightState.FAILED:
            if mode == "check":
                return self._answer(flight, ClaimResult.FAILED)
            if flight.attempt < max_attempts:
                flight.num_sent = 0
                return self._own(flight, job_id, flight.attempt + 1, requesters, ttl_s)
            if mode == "retry":
                return self._answer(flight, ClaimResult.EXHAUSTED)
            flight.num_sent = 0
            return self._own(flight, job_id, 1, requesters, ttl_s)
        if flight.state is FlightState.FINISHED and (mode != "check" or flight.metadata is None):
            flight.num_sent = 0
            return self._own(flight, job_id, 1, requesters, ttl_s)
        is_ours = flight.job_id == job_id and mode != "check"
        if flight.state is FlightState.CLAIMED and (self._is_over(flight) or is_ours):
            return self._own(flight, flight.job_id, flight.attempt, requesters, ttl_s)
        is_idle = flight.state is FlightState.QUEUED or (
            flight.state is FlightState.RUNNING and self._is_over(flight)
        )
        if is_idle and (is_stranded or not (flight.entry_id and self._jobs.is_awaited(flight.entry_id))):
            if flight.num_sent >= MAX_SENDS:
                return self._answer(flight, ClaimResult.EXHAUSTED)
            self._jobs.remove(flight.entry_id)
            return self._own(flight, flight.job_id, flight.attempt, requesters, ttl_s)
        self._join(flight, requesters, ttl_s)
        return self._answer(flight, ClaimResult.JOINED)

    def _own(
        self, flight: Flight, job_id: str, attempt: int, requesters: Iterable[Requester], ttl_s: float
    ) -> FlightClaim:
        flight.become(FlightState.CLAIMED)
        flight.job_id, flight.attempt = job_id, attempt
        flight.until = self._now() + PUBLISH_LEASE_S
        flight.entry_id = flight.stream = flight.encoder = ""
        flight.metadata = flight.failure = None
        self._join(flight, requesters, ttl_s)
        return self._answer(flight, ClaimResult.OWNER)

    def _join(self, flight: Flight, requesters: Iterable[Requester], ttl_s: float) -> None:
        flight.add_requesters(requesters, self._now() + ttl_s)
        self._live_for(flight, ttl_s)

    def _answer(self, flight: Flight, result: ClaimResult) -> FlightClaim:
        return FlightClaim(result, JobId(flight.job_id), flight.attempt, flight.metadata, flight.failure)

    def _is_over(self, flight: Flight) -> bool:
        return self._now() > flight.until

    def _live_for(self, flight: Flight, ttl_s: float) -> None:
        flight.expires_at = max(flight.expires_at, self._now() + ttl_s)

    async def publish_job(self, offer: JobOffer) -> str | None:
        job = offer.job
        flight = self.find(job.mm_hash)
        if flight is None or flight.job_id != job.job_id:
            return None
        if flight.state is not FlightState.CLAIMED:
            return flight.entry_id or None
        flight.become(FlightState.QUEUED)
        flight.stream = self._names.encode_jobs(job.namespace_digest, offer.store)
        flight.entry_id = self._jobs.append(
            job, flight.stream, remaining_ms=offer.remaining_ms, blob=offer.blob
        )
        flight.num_sent += 1
        return flight.entry_id

    async def leave_flight(
        self, mm_hash: str, keys: Iterable[RequesterKey], *, namespace_digest: str
    ) -> bool:
        flight = self.find(mm_hash)
        if flight is None:
            return False
        flight.remove_requesters(keys)
        if flight.state is FlightState.RUNNING:
            return False
        if flight.requesters:
            if flight.state is FlightState.CLAIMED:
                flight.until = OVER
            return False
        del self.flights[mm_hash]
        if flight.state is not FlightState.QUEUED:
            return False
        self._jobs.remove(flight.entry_id)
        return True

    async def start_job(
        self,
        job: EncodeJob,
        entry_id: str,
        encoder: str,
        *,
        lease_s: float,
        ttl_s: float,
        stream: str | None = None,
        metadata: EncoderCacheMetadata | None = None,
    ) -> tuple[StartResult, tuple[Requester, ...]]:
        stream = stream or self._names.encode_jobs(job.namespace_digest)
        flight = self.find(job.mm_hash)
        if flight is None:
            if not self._jobs.has(entry_id):
                return StartResult.GONE, ()
            flight = self.flights[job.mm_hash] = Flight(job.job_id, job.attempt, num_sent=1)
            flight.become(FlightState.CLAIMED)
            flight.add_requesters(job.requesters, self._now() + max(ttl_s, lease_s))
        elif (
            flight.job_id != job.job_id
            or flight.state in (FlightState.FAILED, FlightState.FINISHED)
            or (
                flight.state is FlightState.RUNNING
                and flight.entry_id != entry_id
                and not self._is_over(flight)
            )
        ):
            return StartResult.SUPERSEDED, ()
        elif not flight.requesters:
            del self.flights[job.mm_hash]
            return StartResult.UNWANTED, ()
        self._run(flight, entry_id, stream, encoder, lease_s)
        self._live_for(flight, max(ttl_s, lease_s))
        if metadata is not None:
            flight.metadata = metadata.model_copy(update={"requesters": ()})
        return StartResult.STARTED, flight.waiting()

    async def renew_job(
        self,
        mm_hash: str,
        job_id: str,
        entry_id: str,
        encoder: str,
        *,
        namespace_digest: str,
        lease_s: float,
        stream: str,
    ) -> bool:
        flight = self.find(mm_hash)
        if (
            flight is None
            or flight.job_id != job_id
            or flight.state in (FlightState.FAILED, FlightState.FINISHED)
        ):
            return False
        if flight.state is FlightState.RUNNING and flight.encoder != encoder:
            return False
        self._run(flight, entry_id, stream, encoder, lease_s)
        self._live_for(flight, lease_s)
        return True

    def _run(self, flight: Flight, entry_id: str, stream: str, encoder: str, lease_s: float) -> None:
        flight.become(FlightState.RUNNING)
        flight.entry_id, flight.stream, flight.encoder = entry_id, stream, encoder
        flight.until = self._now() + lease_s

    async def announce_metadata(
        self, metadata: EncoderCacheMetadata, *, namespace_digest: str
    ) -> tuple[Requester, ...] | None:
        flight = self.find(metadata.mm_hash)
        if flight is None or flight.job_id != metadata.job_id:
            return None
        flight.metadata = metadata.model_copy(update={"requesters": ()})
        return flight.waiting()

    async def finish_flight(
        self, metadata: EncoderCacheMetadata, served: Iterable[RequesterKey], *, namespace_digest: str
    ) -> tuple[bool, tuple[Requester, ...] | None]:
        mm_hash = metadata.mm_hash
        flight = self.find(mm_hash)
        if flight is None or flight.job_id != metadata.job_id:
            return True, None
        if flight.metadata is not None:
            flight.metadata = metadata.model_copy(update={"requesters": ()})
        is_finished = flight.requesters.keys() <= set(served)
        if is_finished and not flight.requesters:
            del self.flights[mm_hash]
        elif is_finished:
            flight.become(FlightState.FINISHED)
            flight.entry_id = flight.stream = flight.encoder = ""
            flight.expires_at = self._now() + FINISHED_S
        return is_finished, flight.waiting()

    async def fail_flight(
        self, failure: EncodeFailed, *, namespace_digest: str, by_owner: bool = True
    ) -> tuple[Requester, ...] | None:
        flight = self.find(failure.mm_hash)
        if flight is None or flight.job_id != failure.job_id:
            return None
        if flight.state is FlightState.FINISHED or (by_owner and flight.encoder not in ("", failure.encoder)):
            return ()
        if not flight.requesters:
            del self.flights[failure.mm_hash]
            return ()
        flight.become(FlightState.FAILED)
        flight.failure, flight.metadata, flight.until = failure, None, OVER
        return flight.waiting()


def _number(entry_id: str) -> int:
    return int(entry_id.split("-")[1])
