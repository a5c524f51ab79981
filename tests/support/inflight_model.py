"""FAKE of `bus.Inflight`: the flights and the jobs stream in plain Python.

The scripts are compared with it, and tests without Redis use it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from triptych_common.bus.inflight import MAX_SENDS, Claim, Key, Mode, Standing, Start, key_of
from triptych_common.protocol.ids import JobId
from triptych_common.protocol.messages import EncodeFailed, EncodeJob, EncoderCacheMetadata, Requester


@dataclass
class Flight:
    """One hash."""

    job_id: str
    attempt: int
    state: str = "claimed"
    lease_is_over: bool = False
    entry_id: str = ""
    encoder: str = ""
    num_sent: int = 0
    metadata: EncoderCacheMetadata | None = None
    failure: EncodeFailed | None = None
    requesters: dict[Key, Requester] = field(default_factory=dict)

    def waiting(self) -> tuple[Requester, ...]:
        return tuple(self.requesters[key] for key in sorted(self.requesters))


class InflightModel:
    """Same methods, same answers. `stream` holds the jobs that stand on it, by entry id."""

    def __init__(self) -> None:
        self.flights: dict[str, Flight] = {}
        self.stream: dict[str, EncodeJob] = {}
        self.pending: set[str] = set()  # delivered, not acked
        self.last_delivered = 0  # as the group remembers it
        self._num_entries = 0

    # ---- what else happens to the stream and the clock ----
    def deliver(self, entry_id: str) -> EncodeJob:
        self.pending.add(entry_id)
        self.last_delivered = max(self.last_delivered, _number(entry_id))
        return self.stream[entry_id]

    def is_new(self, entry_id: str) -> bool:
        """No encoder had it yet."""
        return _number(entry_id) > self.last_delivered

    def ack(self, entry_id: str) -> None:
        self.pending.discard(entry_id)
        self.stream.pop(entry_id, None)

    def end_leases(self) -> None:
        for flight in self.flights.values():
            flight.lease_is_over = True

    def lose_flights(self) -> None:
        self.flights.clear()

    def lose_all(self) -> None:
        self.flights.clear()
        self.stream.clear()
        self.pending.clear()
        self.last_delivered = 0

    # ---- Inflight ----
    async def claim(
        self,
        mm_hash: str,
        requesters: Iterable[Requester],
        *,
        mode: Mode,
        job_id: str,
        attempt: int,
        max_attempts: int,
        ttl_s: float,
    ) -> Claim:
        flight, who = self.flights.get(mm_hash), {key_of(each): each for each in requesters}
        if flight is None:
            flight = self.flights[mm_hash] = Flight(job_id, attempt)
            return self._own(flight, job_id, attempt, who)
        if flight.state == "failed":
            if mode == "look":
                return self._answer(flight, Standing.FAILED)
            if flight.attempt < max_attempts:
                flight.num_sent = 0
                return self._own(flight, job_id, flight.attempt + 1, who)
            if mode == "retry":
                return self._answer(flight, Standing.EXHAUSTED)
            flight.num_sent = 0
            return self._own(flight, job_id, 1, who)
        if flight.state == "finished" and mode != "look":
            flight.num_sent = 0
            return self._own(flight, job_id, 1, who)
        if flight.state == "claimed" and (flight.lease_is_over or flight.job_id == job_id):
            return self._own(flight, flight.job_id, flight.attempt, who)
        is_idle = flight.state == "queued" or (flight.state == "running" and flight.lease_is_over)
        if is_idle and not self._is_on_stream(flight.entry_id):
            if flight.num_sent >= MAX_SENDS:
                return self._answer(flight, Standing.EXHAUSTED)
            return self._own(flight, flight.job_id, flight.attempt, who)
        flight.requesters |= who
        return self._answer(flight, Standing.JOINED)

    def _own(self, flight: Flight, job_id: str, attempt: int, who: dict[Key, Requester]) -> Claim:
        flight.job_id, flight.attempt, flight.state, flight.lease_is_over = job_id, attempt, "claimed", False
        flight.entry_id = flight.encoder = ""
        flight.metadata = flight.failure = None
        flight.requesters |= who
        return self._answer(flight, Standing.OWNER)

    def _answer(self, flight: Flight, standing: Standing) -> Claim:
        return Claim(standing, JobId(flight.job_id), flight.attempt, flight.metadata, flight.failure)

    def _is_on_stream(self, entry_id: str) -> bool:
        if not entry_id or not self.stream:
            return False
        return self.is_new(entry_id) or entry_id in self.pending

    async def publish(
        self,
        job: EncodeJob,
        *,
        traceparent: str | None = None,
        remaining_ms: int | None = None,
        blob: bytes | None = None,
    ) -> str | None:
        flight = self.flights.get(job.mm_hash)
        if flight is None or flight.job_id != job.job_id:
            return None
        if flight.state != "claimed":
            return flight.entry_id or None
        self._num_entries += 1
        flight.entry_id, flight.state = f"1-{self._num_entries}", "queued"
        flight.num_sent += 1
        self.stream[flight.entry_id] = job
        return flight.entry_id

    async def leave(self, mm_hash: str, keys: Iterable[Key]) -> bool:
        flight = self.flights.get(mm_hash)
        if flight is None:
            return False
        for key in keys:
            flight.requesters.pop(key, None)
        if flight.state == "running":
            return False
        if flight.requesters:
            flight.lease_is_over |= flight.state == "claimed"
            return False
        del self.flights[mm_hash]
        if flight.state != "queued":
            return False
        self.ack(flight.entry_id)
        return True

    async def start(
        self, job: EncodeJob, entry_id: str, encoder: str, *, lease_s: float, ttl_s: float
    ) -> tuple[Start, tuple[Requester, ...]]:
        flight = self.flights.get(job.mm_hash)
        if flight is None:
            if entry_id not in self.stream:
                return Start.UNWANTED, ()
            flight = self.flights[job.mm_hash] = Flight(job.job_id, job.attempt, num_sent=1)
            flight.requesters = {key_of(each): each for each in job.requesters}
        elif (
            flight.job_id != job.job_id
            or flight.state in ("failed", "finished")
            or (flight.state == "running" and flight.entry_id != entry_id and not flight.lease_is_over)
        ):
            return Start.SUPERSEDED, ()
        elif not flight.requesters:
            del self.flights[job.mm_hash]
            return Start.UNWANTED, ()
        self._run(flight, entry_id, encoder)
        return Start.STARTED, flight.waiting()

    async def renew(self, mm_hash: str, job_id: str, entry_id: str, encoder: str, *, lease_s: float) -> bool:
        flight = self.flights.get(mm_hash)
        if flight is None or flight.job_id != job_id or flight.state in ("failed", "finished"):
            return False
        if flight.state == "running" and flight.encoder != encoder:
            return False
        self._run(flight, entry_id, encoder)
        return True

    def _run(self, flight: Flight, entry_id: str, encoder: str) -> None:
        flight.state, flight.entry_id, flight.encoder = "running", entry_id, encoder
        flight.lease_is_over = False

    async def announce(self, metadata: EncoderCacheMetadata) -> tuple[Requester, ...] | None:
        flight = self.flights.get(metadata.mm_hash)
        if flight is None or flight.job_id != metadata.job_id:
            return None
        flight.metadata = metadata.model_copy(update={"requesters": ()})
        return flight.waiting()

    async def finish(
        self, mm_hash: str, job_id: str, told: Iterable[Key]
    ) -> tuple[bool, tuple[Requester, ...] | None]:
        flight = self.flights.get(mm_hash)
        if flight is None or flight.job_id != job_id:
            return True, None
        is_finished = flight.requesters.keys() <= set(told)
        if is_finished and not flight.requesters:
            del self.flights[mm_hash]
        elif is_finished:
            flight.state, flight.entry_id, flight.encoder = "finished", "", ""
        return is_finished, flight.waiting()

    async def fail(self, failure: EncodeFailed, *, by_owner: bool = True) -> tuple[Requester, ...] | None:
        flight = self.flights.get(failure.mm_hash)
        if flight is None or flight.job_id != failure.job_id:
            return None
        if flight.state == "finished" or (by_owner and flight.encoder not in ("", failure.encoder)):
            return ()
        if not flight.requesters:
            del self.flights[failure.mm_hash]
            return ()
        flight.state, flight.failure, flight.metadata, flight.lease_is_over = "failed", failure, None, True
        return flight.waiting()


def _number(entry_id: str) -> int:
    return int(entry_id.split("-")[1])
