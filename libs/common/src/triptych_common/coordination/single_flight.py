"""Flights: who encodes an item now, and who waits for it, over all gateways. Kept in Redis, on its clock.

    None --claim--> CLAIMED --publish--> QUEUED --start--> RUNNING --finish--> FINISHED --all left--> None
                       |                    |                  `--fail--> FAILED --claim--> CLAIMED ...
                       `--last one leaves---+--> None (a queued job is taken off the stream)

Whoever claims first publishes the job; all others join, and hear what the first one hears. The encoder
asks who waits just before it says anything, and leaves its metadata here for those who join later, so
nobody misses them. A failed flight is claimed once more by exactly one of those who heard of it. A finished
one stays for a moment, for those whom the result did not reach; who orders the item anew begins it again.

A claim whose owner vanished, and a job that neither stands on the stream nor is worked on, pass to the
next who looks. So a flight that Redis lost costs one more job, and those who wait must look now and then.
Every step can be repeated.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import orjson

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.coordination import single_flight_lua as lua
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol import codec
from triptych_common.protocol.ids import JobId
from triptych_common.protocol.messages import EncodeFailed, EncodeJob, EncoderCacheMetadata, Requester
from triptych_common.protocol.names import ENCODERS_GROUP, JOBS_TTL_S
from triptych_common.redis_client.commands import run_command

PUBLISH_LEASE_S = 5.0  # from the claim to the job on the stream
FINISHED_S = 10.0  # that a result may take to its gateways, before it counts as lost
MAX_SENDS = 4  # of one job: when it vanishes again and again, something refuses it

RequesterKey = tuple[str, int]  # (request id, item index)
ClaimMode = Literal["new", "retry", "check"]


class ClaimResult(StrEnum):
    """What a claim came to."""

    OWNER = "owner"  # publish the job
    JOINED = "joined"  # somebody did
    FAILED = "failed"  # it failed, and nobody has claimed it since (only told to who looks)
    EXHAUSTED = "exhausted"  # all attempts failed, or the job vanished too often


@dataclass(frozen=True, slots=True)
class FlightClaim:
    result: ClaimResult
    job_id: JobId
    attempt: int
    metadata: EncoderCacheMetadata | None = None  # announced before we joined
    failure: EncodeFailed | None = None


class StartResult(StrEnum):
    """Whether an encoder shall work on a job that it took from the stream."""

    STARTED = "started"
    UNWANTED = "unwanted"  # everybody who waited has left
    SUPERSEDED = "superseded"  # another encoder works on it, or another job took its place


class SingleFlight:
    """The flights of one deployment. Errors: BusUnavailableError."""

    def __init__(self, bus: AsyncBus) -> None:
        self._names = bus.names
        register = bus.client.register_script
        self._claim, self._publish = register(lua.CLAIM), register(lua.PUBLISH)
        self._leave, self._start = register(lua.LEAVE), register(lua.START)
        self._renew, self._announce = register(lua.RENEW), register(lua.ANNOUNCE)
        self._finish, self._fail = register(lua.FINISH), register(lua.FAIL)
        self._backlog = register(lua.BACKLOG)

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
    ) -> FlightClaim:
        """Subscribe `requesters`; become the owner where nobody else is.

        Args:
            namespace_digest: that `mm_hash` was made with; its encoders get the job.
            mode: `new`: wanted for the first time; `retry`: its failure was heard; `look`: is all well?
            job_id: of the job to publish, unless one is in flight.
            attempt: of that job, unless Redis knows better.
            ttl_s: seconds until nobody of these waits any more.
        """
        reply = await self._run_with_jobs(
            self._claim, mm_hash, namespace_digest, mode, job_id, attempt, max_attempts, _ms(ttl_s),
            _ms(PUBLISH_LEASE_S), MAX_SENDS, ENCODERS_GROUP, *_fields(requesters),
        )  # fmt: skip
        result, its_job, its_attempt, metadata, failure = reply
        return FlightClaim(
            ClaimResult(result.decode()),
            JobId(its_job.decode()),
            int(its_attempt),
            EncoderCacheMetadata.model_validate_json(metadata) if metadata else None,
            EncodeFailed.model_validate_json(failure) if failure else None,
        )

    async def publish_job(
        self,
        job: EncodeJob,
        *,
        traceparent: str | None = None,
        remaining_ms: int | None = None,
        blob: bytes | None = None,
    ) -> str | None:
        """Put the job of a claimed flight on the stream, once, however often it is asked.

        Returns:
            The entry's id; None: the flight is not this job's any more.
        """
        fields = codec.encode(job, traceparent=traceparent, remaining_ms=remaining_ms, blob=blob)
        lasts_ms = max(_ms(JOBS_TTL_S), remaining_ms or 0)
        reply = await self._run_with_jobs(
            self._publish, job.mm_hash, job.namespace_digest, job.job_id, lasts_ms, *_flat(fields)
        )
        return reply.decode() or None

    async def leave_flight(
        self, mm_hash: str, keys: Iterable[RequesterKey], *, namespace_digest: str
    ) -> bool:
        """These wait no more. True: nobody does, and the job, which no encoder had, was dropped."""
        reply = await self._run_with_jobs(
            self._leave, mm_hash, namespace_digest, ENCODERS_GROUP, *map(_field, keys)
        )
        return bool(reply)

    async def read_backlog(self, namespace_digest: str) -> tuple[int, float]:
        """(jobs of the namespace, seconds that the oldest of those that no encoder took has waited)."""
        stream = self._names.encode_jobs(namespace_digest)
        num_entries, age_ms = await run_command(
            "backlog", lambda: self._backlog(keys=[stream], args=[ENCODERS_GROUP])
        )
        return int(num_entries), max(0, int(age_ms)) / 1000

    # ---- encoders --------------------------------------------------------------------------------
    async def start_job(
        self, job: EncodeJob, entry_id: str, encoder: str, *, lease_s: float, ttl_s: float
    ) -> tuple[StartResult, tuple[Requester, ...]]:
        """`encoder` took `job` from the stream. Returns whether to work on it, and for whom.

        An entry that was taken over is started anew; a second entry of the same job is not, while the
        encoder of the first renews its lease.
        """
        reply = await self._run_with_jobs(
            self._start, job.mm_hash, job.namespace_digest, job.job_id, entry_id, encoder, _ms(lease_s),
            _ms(max(ttl_s, lease_s)), job.attempt, *_fields(job.requesters),
        )  # fmt: skip
        return StartResult(reply[0].decode()), _requesters(reply[1:])

    async def renew_job(
        self, mm_hash: str, job_id: str, entry_id: str, encoder: str, *, lease_s: float
    ) -> bool:
        """`encoder` still works on the job. False: another one does, or Redis knows nothing of it."""
        return bool(await self._run(self._renew, mm_hash, job_id, entry_id, encoder, _ms(lease_s)))

    async def announce_metadata(self, metadata: EncoderCacheMetadata) -> tuple[Requester, ...] | None:
        """Leave `metadata`, without its requesters, for those who join later.

        Returns:
            Who waits now; None: there is no flight.
        """
        reply = await self._run(
            self._announce, metadata.mm_hash, metadata.job_id,
            metadata.model_copy(update={"requesters": ()}).model_dump_json().encode(),
        )  # fmt: skip
        return None if reply[0] == b"gone" else _requesters(reply[1:])

    async def finish_flight(
        self, mm_hash: str, job_id: str, told: Iterable[RequesterKey]
    ) -> tuple[bool, tuple[Requester, ...] | None]:
        """The item is sealed, and `told` have heard all of it.

        Returns:
            (whether the flight has ended, who waits); not ended: somebody joined, tell them and ask again.
            None: there was no flight.
        """
        reply = await self._run(self._finish, mm_hash, job_id, _ms(FINISHED_S), *map(_field, told))
        if reply[0] == b"gone":
            return True, None
        return reply[0] == b"finished", _requesters(reply[1:])

    async def fail_flight(
        self, failure: EncodeFailed, *, by_owner: bool = True
    ) -> tuple[Requester, ...] | None:
        """The job produces nothing. Returns who must hear it: nobody, when another encoder works on it.

        `by_owner` False: whoever worked on it. None: there was no flight.
        """
        reply = await self._run(
            self._fail, failure.mm_hash, failure.job_id, failure.encoder if by_owner else "",
            failure.model_dump_json().encode(),
        )  # fmt: skip
        return None if reply[0] == b"gone" else _requesters(reply[1:])

    async def _run_with_jobs(
        self, script: Any, mm_hash: str, namespace_digest: str, *arguments: str | bytes | int
    ) -> Any:
        keys = [self._names.inflight(mm_hash), self._names.encode_jobs(namespace_digest)]
        return await self._call(script, keys, arguments)

    async def _run(self, script: Any, mm_hash: str, *arguments: str | bytes | int) -> Any:
        return await self._call(script, [self._names.inflight(mm_hash)], arguments)

    async def _call(self, script: Any, keys: list[str], arguments: Sequence[str | bytes | int]) -> Any:
        reply = await run_command("inflight", lambda: script(keys=keys, args=arguments))
        if reply is None:
            raise BusUnavailableError("inflight: Redis answered nothing")
        return reply


def requester_key(requester: Requester) -> RequesterKey:
    return requester.request_id, requester.item_index


def _field(key: RequesterKey) -> str:
    return f"r:{key[0]}/{key[1]}"


def _fields(requesters: Iterable[Requester]) -> list[str | bytes]:
    return [
        part for each in requesters for part in (_field(requester_key(each)), orjson.dumps(each.model_dump()))
    ]


def _flat(fields: Mapping[bytes, bytes]) -> list[bytes]:
    return [part for pair in fields.items() for part in pair]


def _requesters(found: Sequence[bytes]) -> tuple[Requester, ...]:
    """Sorted, so that what is published does not depend on Redis' hash."""
    return tuple(sorted((Requester.model_validate_json(each) for each in found), key=requester_key))


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
