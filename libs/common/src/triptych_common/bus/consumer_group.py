"""Typed Redis commands of one consumer in one group of one stream, and nothing more.

Entries that a consumer holds but does not work on any more are found with XPENDING and taken with
XCLAIM. Unlike XAUTOCLAIM this leaves out what this very consumer is working on, returns how often
each entry was delivered, and finds entries whose content is gone.
"""

import asyncio
import time
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError, ResponseError

from triptych_common.bus.fair_share import GroupLoad
from triptych_common.protocol.names import OWNER_GROUP
from triptych_common.redis_client.commands import COMMAND_LIMIT_S, READ_LIMIT_S, is_existing_group, read_time
from triptych_common.redis_client.scripts import EXTEND_EXPIRY, Value, load_script

CLOCK_CHECK_AGE_S = 1.0
SPARE_MAX_WAIT_MS = 1000
"""Milliseconds for which a spare entry is left to consumers with free slots before another may take it."""

TAKE_SPARE = load_script(__package__, "take_spare")
_HAND_BACK_IDLE_MS = 1_000_000_000


@dataclass(frozen=True)
class StreamEntry:
    entry_id: bytes
    fields: Mapping[bytes, bytes]
    num_deliveries: int = 1

    @property
    def published_s(self) -> float:
        """Redis' clock in seconds when the entry was appended."""
        return int(self.entry_id.split(b"-")[0]) / 1000


@dataclass(frozen=True)
class _PendingEntry:
    entry_id: bytes
    num_deliveries: int


class ConsumerGroup:
    """Commands of one consumer; `reader` serves blocking reads only, `client` all others.

    The only consumer of a stream of its own (`OWNER_GROUP`) has nothing delivered to it noted by Redis: what
    the stream still holds is not handled, since handled entries are deleted. That saves an ack of each.

    Every method raises redis-py's errors, and TimeoutError when it takes too long.
    """

    def __init__(
        self,
        client: Redis,
        reader: Redis,
        stream: str,
        group: str,
        consumer: str,
        *,
        lasts_s: int | None = None,
    ) -> None:
        """Store the stream and group; `lasts_s` is the stream's lifetime from `ensure` on, None for ever."""
        self._client = client
        self._reader = reader
        self.stream = stream
        self.group = group
        self.consumer = consumer
        self.is_sole = group == OWNER_GROUP
        self._lasts_s = lasts_s
        self._redis_clock_offset_s = 0.0
        self._knows_clock = False

    async def ensure(self) -> bool:
        """Create the missing stream and group, from the stream's start, and learn Redis' clock.

        Returns:
            Whether the group was missing.
        """
        is_new = True
        try:
            await _any(self._client.xgroup_create(self.stream, self.group, id="0", mkstream=True))
        except ResponseError as error:
            if not is_existing_group(error):
                raise
            is_new = False
        if self._lasts_s is not None:
            arguments = EXTEND_EXPIRY.arguments(ttl_ms=self._lasts_s * 1000)
            await _any(self._client.eval(EXTEND_EXPIRY.text, 1, self.stream, *arguments))
        await self._learn_clock()
        return is_new

    async def queued_s(self, entry: StreamEntry) -> float:
        """Return the seconds since `entry` was published, by Redis' clock."""
        age_s = self._age_s(entry)
        if age_s > CLOCK_CHECK_AGE_S:  # or Redis' clock was set: a wrong age would expire jobs
            await self._learn_clock()
            age_s = self._age_s(entry)
        return age_s

    def _age_s(self, entry: StreamEntry) -> float:
        return max(0.0, time.monotonic() + self._redis_clock_offset_s - entry.published_s)

    async def _learn_clock(self) -> None:
        before = time.monotonic()
        seconds, micros = await _any(read_time(self._client, self.stream))
        middle = (before + time.monotonic()) / 2
        self._redis_clock_offset_s = seconds + micros / 1e6 - middle
        self._knows_clock = True

    async def read_new(self, count: int, block_ms: int, done: Iterable[bytes] = ()) -> list[StreamEntry]:
        """Return entries that no consumer of the group has had, or none after `block_ms`.

        `done`: acked by the same write, before the read. After an error they may not be acked.
        """
        async with self._reader.pipeline(transaction=False) as pipe:
            self._drop(pipe, list(done))
            pipe.xreadgroup(
                self.group, self.consumer, {self.stream: ">"}, count=count, block=block_ms, noack=self.is_sole
            )
            replies = await _any(pipe.execute(raise_on_error=False), READ_LIMIT_S)
        for each in replies:  # as Redis worded it: `NOGROUP` has a meaning here, a pipeline's error has not
            if isinstance(each, RedisError):
                raise each
        reply = replies[-1]
        return [StreamEntry(entry_id, fields) for _, entries in reply or [] for entry_id, fields in entries]

    async def read_load(self) -> GroupLoad:
        """Read in one round trip the entries that the group's consumers hold and the number that waits."""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.xlen(self.stream)
            pipe.xinfo_consumers(self.stream, self.group)
            num_entries, consumers = await _any(pipe.execute())
        num_held = {each["name"].decode(): int(each["pending"]) for each in consumers}
        return GroupLoad(max(num_entries - sum(num_held.values()), 0), num_held)

    async def take_spare(self, slots: Mapping[str, int]) -> list[StreamEntry]:
        """Take one entry that the group's own consumers have not taken in time, if there is one; never waits.

        `slots`: entries that each consumer holds at most, by its name.
        """
        if not self._knows_clock:
            await self._learn_clock()
        peers: list[Value] = [part for pair in slots.items() for part in pair]
        arguments = TAKE_SPARE.arguments(
            peers, group=self.group, consumer=self.consumer, max_wait_ms=SPARE_MAX_WAIT_MS
        )
        reply = await _any(self._client.eval(TAKE_SPARE.text, 1, self.stream, *arguments))
        if not reply:
            return []
        entry_id, flat = reply
        return [StreamEntry(entry_id, dict(zip(flat[::2], flat[1::2], strict=True)))]

    async def take_own(self, count: int, held: Collection[bytes]) -> list[StreamEntry]:
        """Return entries delivered to this consumer's name that are not in `held`."""
        if self.is_sole:
            found = await _any(self._client.xrange(self.stream, count=count + len(held)))
            free = [StreamEntry(entry_id, fields) for entry_id, fields in found if entry_id not in held]
            return free[:count]
        pending = await self._pending(count + len(held), consumer=self.consumer)
        return await self._claim([each for each in pending if each.entry_id not in held][:count], 0)

    async def take_over(self, count: int, min_idle_ms: int, held: Collection[bytes]) -> list[StreamEntry]:
        pending = await self._pending(count + len(held), min_idle_ms=min_idle_ms)
        wanted = [each for each in pending if each.entry_id not in held][:count]
        return await self._claim(wanted, min_idle_ms)

    async def renew(self, held: Collection[bytes]) -> None:
        """Restart the idle time of those entries of `held` that this consumer still owns."""
        own = await self._pending(max(100, 2 * len(held)), consumer=self.consumer)
        ours = [each.entry_id for each in own if each.entry_id in held]
        if ours:
            await _any(
                self._client.xclaim(self.stream, self.group, self.consumer, 0, _ids(ours), justid=True)
            )

    async def hand_back(self, entries: Sequence[StreamEntry]) -> None:
        """Let any consumer take these over at once; this delivery does not count."""
        if not entries or self.is_sole:
            return
        async with self._client.pipeline(transaction=False) as pipe:
            for entry in entries:
                pipe.xclaim(
                    self.stream, self.group, self.consumer, 0, [entry.entry_id],
                    idle=_HAND_BACK_IDLE_MS, retrycount=entry.num_deliveries - 1, justid=True,
                )  # fmt: skip
            await _any(pipe.execute())

    async def ack(self, entry_ids: Iterable[bytes]) -> None:
        """Drop handled entries from the stream and the group, in one round trip.

        No transaction: a Redis that is out of memory refuses to queue even what would free memory. An
        entry that is deleted but still pending is noticed when it is claimed (`_ack_vanished`).
        """
        async with self._client.pipeline(transaction=False) as pipe:
            self._drop(pipe, list(entry_ids))
            await _any(pipe.execute())

    def _drop(self, pipe: Pipeline, ids: Sequence[bytes]) -> None:
        if ids:
            pipe.xdel(self.stream, *ids)
            if not self.is_sole:
                pipe.xack(self.stream, self.group, *ids)

    async def replace(self, entry_id: bytes, fields: Mapping[bytes, bytes], stream: str, maxlen: int) -> None:
        """Append `fields` to `stream` of about `maxlen` entries, then ack `entry_id`."""
        await _any(self._client.xadd(stream, cast("dict[Any, Any]", fields), maxlen=maxlen))
        await self.ack([entry_id])

    async def _pending(
        self, count: int, *, consumer: str | None = None, min_idle_ms: int | None = None
    ) -> list[_PendingEntry]:
        reply = await _any(
            self._client.xpending_range(
                self.stream, self.group, "-", "+", count, consumername=consumer, idle=min_idle_ms
            )
        )
        return [_PendingEntry(each["message_id"], each["times_delivered"]) for each in reply]

    async def _claim(self, pending: Sequence[_PendingEntry], min_idle_ms: int) -> list[StreamEntry]:
        """Claim `pending`; entries whose content is gone are acked and left out."""
        if not pending:
            return []
        ids = [each.entry_id for each in pending]
        reply = await _any(
            self._client.xclaim(self.stream, self.group, self.consumer, min_idle_ms, _ids(ids))
        )
        contents = {entry_id: fields for entry_id, fields in reply if entry_id is not None and fields}
        taken = [
            StreamEntry(each.entry_id, contents[each.entry_id], each.num_deliveries + 1)
            for each in pending
            if each.entry_id in contents
        ]
        if len(taken) < len(pending):
            await self._ack_vanished([entry_id for entry_id in ids if entry_id not in contents])
        return taken

    async def _ack_vanished(self, entry_ids: Sequence[bytes]) -> None:
        """Ack the entries that the stream no longer holds; the others were taken by another consumer."""
        for entry_id in entry_ids:
            if not await _any(self._client.xrange(self.stream, entry_id, entry_id, count=1)):
                await self.ack([entry_id])


async def _any(reply: Awaitable[Any], limit_s: float | None = None) -> Any:
    """Await a reply within the limit. redis-py leaves its type open; the callers know it."""
    async with asyncio.timeout(COMMAND_LIMIT_S if limit_s is None else limit_s):
        return await reply


def _ids(entry_ids: Iterable[bytes]) -> list[Any]:
    return list(entry_ids)
