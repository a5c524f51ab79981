"""Single flight: which encoder works on an item, and which requests wait for it, over all gateways.

A flight is a hash in Redis, on Redis' clock, with the states of `ALLOWED`. The first to claim it
publishes the job, most often with the claim itself; all others join, and receive what the first one
receives. The encoder starts the job when it knows the item's size: it learns the requesters, and leaves its
metadata here for those that join later, so that none misses them. It asks again before it publishes
anything else. A failed flight is claimed once more by exactly one of those that received the failure. A
finished one stays for a moment, for requesters that the result did not reach; a new order of the item
begins it again.

A flight notes on which stream its job is: that of one store's encoders. A job whose stream has lost all its
encoders is taken off there by the gateway that checks next, and published where there are some.

A claim whose owner vanished, and a job that neither stands on its stream nor is worked on, pass to the
gateway that checks next. So a flight that Redis lost costs one more job, and gateways must check now and
then. Every step can be repeated.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import orjson

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol import codec
from triptych_common.protocol.ids import JobId
from triptych_common.protocol.messages import (
    EncodeFailed,
    EncodeJob,
    EncoderCacheMetadata,
    Requester,
    RequesterKey,
    requester_key,
)
from triptych_common.protocol.names import DEFAULT_STORE, ENCODERS_GROUP, JOBS_TTL_S
from triptych_common.redis_client.commands import run_command
from triptych_common.redis_client.scripts import LuaScript, Value, load_script


class FlightState(StrEnum):
    """States of a flight, in the hash field `state`.

        None --claim--> CLAIMED --publish--> QUEUED --start--> RUNNING --finish--> FINISHED --all left--> None
                           |                    |                  `--fail--> FAILED --claim--> CLAIMED ...
                           `--last one leaves---+--> None (a queued job is taken off the stream)

    A claim with an offered job goes on to QUEUED in one step. Besides: a claim or a job that was lost is
    claimed again; a start of a job whose flight Redis lost begins at CLAIMED; a Redis that is out of memory
    or comes back empty notes no start, so the end can come from CLAIMED and QUEUED; a job that failed for one
    encoder can be finished by another. `become` in `lua/flight.lua` alone assigns the state; a step that is
    not in the table is an error of the script, and the state stays.
    """

    CLAIMED = "claimed"  # a gateway is about to publish the job
    QUEUED = "queued"  # on the stream, no encoder has announced its item
    RUNNING = "running"  # an encoder works on it, and has announced its item
    FINISHED = "finished"  # sealed; stays for requesters that the result did not reach
    FAILED = "failed"  # stays until it is claimed again or all have left


_ENDS = {FlightState.FINISHED, FlightState.FAILED}
ALLOWED: dict[FlightState, frozenset[FlightState]] = {
    FlightState.CLAIMED: frozenset({FlightState.CLAIMED, FlightState.QUEUED, FlightState.RUNNING, *_ENDS}),
    FlightState.QUEUED: frozenset({FlightState.CLAIMED, FlightState.RUNNING, *_ENDS}),
    FlightState.RUNNING: frozenset({FlightState.CLAIMED, FlightState.RUNNING, *_ENDS}),
    FlightState.FINISHED: frozenset({FlightState.CLAIMED, FlightState.FINISHED}),
    FlightState.FAILED: frozenset({FlightState.CLAIMED, *_ENDS}),
}


def _lua_set(states: frozenset[FlightState]) -> str:
    return "{" + ", ".join(f"{each} = true" for each in sorted(states)) + "}"


_ROWS = [f"{state} = {_lua_set(follows)}" for state, follows in ALLOWED.items()]
_FIRST = _lua_set(frozenset({next(iter(ALLOWED))}))  # what begins a flight, as for `check_transition`
_SHARED = f"local ALLOWED = {{[''] = {_FIRST}, {', '.join(_ROWS)}}}\n" + files(__package__).joinpath(
    "lua", "flight.lua"
).read_text("utf-8")
PRELUDE = f"local READS_REQUESTERS = false\n{_SHARED}"
PRELUDE_WITH_REQUESTERS = f"local READS_REQUESTERS = true\n{_SHARED}"


PUBLISH_LEASE_S = 5.0  # from the claim to the job on the stream
FINISHED_S = 10.0  # for a result to reach its gateways before it counts as lost
MAX_SENDS = 4  # of one job: if it vanishes again and again, something refuses it

ClaimMode = Literal["new", "retry", "check"]

BACKLOG_PRELUDE = files(__package__).joinpath("lua", "backlog.lua").read_text("utf-8")
CLAIM = load_script(__package__, "claim_flight", prelude=PRELUDE + BACKLOG_PRELUDE)
PUBLISH, RENEW = (load_script(__package__, name, prelude=PRELUDE) for name in ("publish_job", "renew_job"))
LEAVE, START, ANNOUNCE, FINISH, FAIL = (
    load_script(__package__, name, prelude=PRELUDE_WITH_REQUESTERS)
    for name in ("leave_flight", "start_job", "announce_metadata", "finish_flight", "fail_flight")
)
READ_BACKLOG = load_script(__package__, "read_backlog", prelude=BACKLOG_PRELUDE)


class ClaimResult(StrEnum):
    OWNER = "owner"  # publish the job
    JOINED = "joined"  # another gateway does, or did
    FAILED = "failed"  # it failed, and has not been claimed since (of a check only)
    EXHAUSTED = "exhausted"  # all attempts failed, or the job vanished too often


class Backlog(NamedTuple):
    """Jobs that wait on one store's stream."""

    num_jobs: int
    oldest_s: float  # wait of the oldest job that no encoder took


Backlogs = Mapping[str, Backlog]
"""Backlogs of a namespace's job streams, by store."""


def merge_backlogs(backlogs: Backlogs) -> Backlog:
    """Merge backlogs: number of jobs, and the least wait of the next job at any store."""
    found = backlogs.values()
    return Backlog(sum(each.num_jobs for each in found), min((each.oldest_s for each in found), default=0.0))


@dataclass(frozen=True, slots=True)
class FlightClaim:
    result: ClaimResult
    job_id: JobId
    attempt: int
    metadata: EncoderCacheMetadata | None = None  # announced before this claim
    failure: EncodeFailed | None = None
    backlogs: Backlogs | None = None  # for an owner that asked for them
    entry_id: str = ""  # of the offered job, which stands on its stream; "": the owner is to publish


@dataclass(frozen=True, slots=True)
class JobOffer:
    """Job that a claim publishes if the flight becomes the claimant's, under this id and attempt.

    `spare_after_ms` to `blob`: as for `codec.encode`.
    """

    job: EncodeJob
    store: str = DEFAULT_STORE
    spare_after_ms: int | None = None
    traceparent: str | None = None
    remaining_ms: int | None = None
    blob: bytes | None = field(default=None, repr=False)
    max_oldest_s: float | None = None  # not published where each store's backlog, if read, is older

    def entry_fields(self) -> list[bytes]:
        fields = codec.encode(
            self.job,
            traceparent=self.traceparent,
            remaining_ms=self.remaining_ms,
            blob=self.blob,
            spare_after_ms=self.spare_after_ms,
        )
        return [part for pair in fields.items() for part in pair]


class StartResult(StrEnum):
    """Outcome of an encoder's start of a job that it took from the stream."""

    STARTED = "started"
    UNWANTED = "unwanted"  # all requesters have left
    GONE = "gone"  # neither flight nor entry: all had left before it began, or Redis lost them
    SUPERSEDED = "superseded"  # another encoder works on it, or another job took its place


class SingleFlight:
    """Flights of one deployment. Methods raise BusUnavailableError."""

    def __init__(self, bus: AsyncBus) -> None:
        self._names = bus.names
        scripts = (CLAIM, PUBLISH, LEAVE, START, RENEW, ANNOUNCE, FINISH, FAIL, READ_BACKLOG)
        self._registered = {each: bus.client.register_script(each.text) for each in scripts}

    # ---- gateways --------------------------------------------------------------------------------
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
        """Join `requesters` to the flight, or become its owner if there is none.

        Args:
            namespace_digest: namespace of `mm_hash`; its encoders get the job.
            mode: `new`: ordered for the first time; `retry`: its failure was received; `check`: is it
                still on its way?
            job_id: id of the job to publish, unless one is in flight.
            attempt: attempt number of that job, unless Redis has another.
            ttl_s: seconds until none of these waits any more.
            stores: to whose encoders the job may go.
            has_encoders: each of them has some, so a job that waits for another's encoders is claimed again.
            with_backlog: an owner gets the backlogs of `stores` too, before it publishes.
            offer: job for an owner to publish at once, at one of `stores`; saves a round trip.
        """
        entry_fields = [] if offer is None else offer.entry_fields()
        max_oldest_s = None if offer is None else offer.max_oldest_s
        reply = await self._run(
            CLAIM, namespace_digest, mm_hash, self._streams(namespace_digest, stores),
            [*entry_fields, *_fields(requesters)],
            mode=mode, job=job_id, attempt=attempt, max_attempts=max_attempts, ttl_ms=_ms(ttl_s),
            claim_ms=_ms(PUBLISH_LEASE_S), max_sends=MAX_SENDS, group=ENCODERS_GROUP,
            with_backlog=int(with_backlog), may_move=int(has_encoders),
            offered=0 if offer is None else 1 + list(stores).index(offer.store),
            remaining_ms=0 if offer is None else offer.remaining_ms or 0, new_ms=_ms(JOBS_TTL_S),
            max_oldest_ms="" if max_oldest_s is None else _ms(max_oldest_s), num_fields=len(entry_fields),
        )  # fmt: skip
        result, its_job, its_attempt, metadata, failure, entry_id, *found = reply
        return FlightClaim(
            ClaimResult(result.decode()),
            JobId(its_job.decode()),
            int(its_attempt),
            EncoderCacheMetadata.model_validate_json(metadata) if metadata else None,
            EncodeFailed.model_validate_json(failure) if failure else None,
            _backlogs(stores, found[0]) if found else None,
            entry_id.decode(),
        )

    async def publish_job(self, offer: JobOffer) -> str | None:
        """Put the job of a claimed flight on the stream of its store, once over any number of calls.

        Returns:
            The entry's id; None if the flight has another job now.
        """
        job = offer.job
        streams = self._streams(job.namespace_digest, [offer.store])
        reply = await self._run(
            PUBLISH, job.namespace_digest, job.mm_hash, streams, offer.entry_fields(),
            job=job.job_id, remaining_ms=offer.remaining_ms or 0, new_ms=_ms(JOBS_TTL_S),
        )  # fmt: skip
        return reply.decode() or None

    async def leave_flight(
        self, mm_hash: str, keys: Iterable[RequesterKey], *, namespace_digest: str
    ) -> bool:
        """Remove requesters; return True if none is left and the job, which no encoder had, was dropped."""
        reply = await self._run(
            LEAVE, namespace_digest, mm_hash, rest=map(_field, keys), group=ENCODERS_GROUP
        )
        return bool(reply)

    async def read_backlogs(
        self, namespace_digest: str, stores: Sequence[str] = (DEFAULT_STORE,)
    ) -> Backlogs:
        keys = self._streams(namespace_digest, stores)
        reply = await self._call(READ_BACKLOG, keys, READ_BACKLOG.arguments(group=ENCODERS_GROUP))
        return _backlogs(stores, reply)

    # ---- encoders --------------------------------------------------------------------------------
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
        """Record that `encoder` took `job` from `stream`; return whether to run it, and its requesters.

        An entry that was taken over is started anew; a second entry of the same job is not, while the
        encoder of the first renews its lease. A missing flight stops an encoder that is about to begin, but
        not one that has begun. `metadata` is kept as by `announce_metadata`.
        """
        reply = await self._run(
            START, job.namespace_digest, job.mm_hash,
            [stream or self._names.encode_jobs(job.namespace_digest)], _fields(job.requesters),
            job=job.job_id, entry=entry_id, encoder=encoder, lease_ms=_ms(lease_s),
            ttl_ms=_ms(max(ttl_s, lease_s)), attempt=job.attempt,
            metadata=b"" if metadata is None else _kept(metadata),
        )  # fmt: skip
        return StartResult(reply[0].decode()), _requesters(reply[1:])

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
        """Renew the job's lease; return False if another encoder has it or Redis does not know it."""
        reply = await self._run(
            RENEW, namespace_digest, mm_hash, [stream],
            job=job_id, entry=entry_id, encoder=encoder, lease_ms=_ms(lease_s),
        )  # fmt: skip
        return bool(reply)

    async def announce_metadata(
        self, metadata: EncoderCacheMetadata, *, namespace_digest: str
    ) -> tuple[Requester, ...] | None:
        """Store `metadata`, without its requesters, for those that join later.

        Returns:
            The requesters that wait now; None: there is no flight.
        """
        reply = await self._run(
            ANNOUNCE, namespace_digest, metadata.mm_hash, job=metadata.job_id, metadata=_kept(metadata)
        )
        return None if reply[0] == b"gone" else _requesters(reply[1:])

    async def finish_flight(
        self, metadata: EncoderCacheMetadata, served: Iterable[RequesterKey], *, namespace_digest: str
    ) -> tuple[bool, tuple[Requester, ...] | None]:
        """Record that the item of `metadata` is sealed and that `served` were sent all of it.

        Returns:
            (whether the flight has ended, the requesters that wait); not ended: others have joined, send
            it to them and ask again. None: there was no flight.
        """
        reply = await self._run(
            FINISH, namespace_digest, metadata.mm_hash, rest=map(_field, served),
            job=metadata.job_id, metadata=_kept(metadata), finished_ms=_ms(FINISHED_S),
        )  # fmt: skip
        if reply[0] == b"gone":
            return True, None
        return reply[0] == b"finished", _requesters(reply[1:])

    async def fail_flight(
        self, failure: EncodeFailed, *, namespace_digest: str, by_owner: bool = True
    ) -> tuple[Requester, ...] | None:
        """Record that the job failed; return its requesters, or none if another encoder works on it.

        With `by_owner` False, any encoder may have had it. Returns None if there was no flight.
        """
        reply = await self._run(
            FAIL, namespace_digest, failure.mm_hash,
            job=failure.job_id, encoder=failure.encoder if by_owner else "",
            failure=failure.model_dump_json().encode(),
        )  # fmt: skip
        return None if reply[0] == b"gone" else _requesters(reply[1:])

    async def _run(
        self,
        script: LuaScript,
        namespace_digest: str,
        mm_hash: str,
        streams: Iterable[str] = (),
        rest: Iterable[Value] = (),
        **named: Value,
    ) -> Any:
        """Run a step of the item's flight; `streams` are those besides the one that the flight names."""
        keys = [self._names.inflight(namespace_digest, mm_hash), *streams]
        return await self._call(script, keys, script.arguments(rest, **named))

    def _streams(self, namespace_digest: str, stores: Iterable[str]) -> list[str]:
        return [self._names.encode_jobs(namespace_digest, each) for each in stores]

    async def _call(self, script: LuaScript, keys: list[str], arguments: list[Value]) -> Any:
        registered = self._registered[script]
        reply = await run_command(script.name, lambda: registered(keys=keys, args=arguments))
        if reply is None:
            raise BusUnavailableError(f"{script.name}: Redis answered nothing")
        return reply


def _backlogs(stores: Sequence[str], reply: Sequence[int]) -> Backlogs:
    pairs = zip(reply[::2], reply[1::2], strict=True)
    found = [Backlog(num_jobs, max(0, age_ms) / 1000) for num_jobs, age_ms in pairs]
    return dict(zip(stores, found, strict=True))


def _kept(metadata: EncoderCacheMetadata) -> bytes:
    """Return what a flight keeps of `metadata`: all but its requesters, which the flight has itself."""
    return metadata.model_copy(update={"requesters": ()}).model_dump_json().encode()


def _field(key: RequesterKey) -> str:
    return f"r:{key[0]}/{key[1]}"


def _fields(requesters: Iterable[Requester]) -> list[Value]:
    return [
        part for each in requesters for part in (_field(requester_key(each)), orjson.dumps(each.model_dump()))
    ]


def _requesters(found: Sequence[bytes]) -> tuple[Requester, ...]:
    """Return requesters sorted, so that published messages do not depend on Redis' hash order."""
    return tuple(sorted((Requester.model_validate_json(each) for each in found), key=requester_key))


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
