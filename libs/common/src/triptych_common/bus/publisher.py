"""Append entries to streams within their bounds, in one round trip."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from triptych_common.bus.stream_bounds import StreamBounds
from triptych_common.domain.errors import BusUnavailableError, StreamFullError
from triptych_common.protocol.names import INBOX_TTL_S
from triptych_common.redis_client.commands import run_command, send_command
from triptych_common.redis_client.failures import is_passing, unavailable

NewEntry = tuple[str, Mapping[bytes, bytes]]


@dataclass(frozen=True)
class RefusedEntry:

    entry: NewEntry
    error: BusUnavailableError

    @property
    def is_final(self) -> bool:
        """True if a retry is useless: the stream is full, because its reader has stopped."""
        return isinstance(self.error, StreamFullError)


class Publisher:
    """Appends for `AsyncBus.publish` and `AsyncBus.publish_encoded`."""

    def __init__(self, client: Redis, bounds: StreamBounds, is_inbox: Callable[[str], bool]) -> None:
        self._client = client
        self._is_inbox = is_inbox
        self._bounds = bounds

    async def append(self, stream: str, fields: Mapping[bytes, bytes]) -> str:
        if stream in await self._find_full([stream]):
            raise self._bounds.error(stream)
        (reply,) = await run_command("publish", lambda: self._send([(stream, fields)]))
        if isinstance(reply, RedisError):
            raise unavailable("publish", reply)
        return _text(reply)

    async def append_all(self, entries: Sequence[NewEntry]) -> list[RefusedEntry]:
        """Append `entries` without a retry; return the refused ones."""
        full = await self._find_full(dict.fromkeys(stream for stream, _ in entries))
        wanted = [entry for entry in entries if entry[0] not in full]
        replies: list[Any] = []
        if wanted:
            replies = await run_command("publish", lambda: self._send(wanted), retry_for_s=0)
        errors = {
            id(entry): unavailable("publish", reply)
            for entry, reply in zip(wanted, replies, strict=True)
            if isinstance(reply, RedisError)
        }
        errors |= {id(entry): self._bounds.error(entry[0]) for entry in entries if entry[0] in full}
        return [RefusedEntry(entry, errors[id(entry)]) for entry in entries if id(entry) in errors]

    async def length(self, stream: str) -> int:
        length: int = await run_command("stream_length", lambda: send_command(self._client, "XLEN", stream))
        return length

    async def _find_full(self, streams: Iterable[str]) -> set[str]:
        full = set()
        for stream in streams:
            if self._bounds.is_full(stream):
                self._bounds.saw(stream, await self.length(stream))
                if self._bounds.is_full(stream):
                    full.add(stream)
        return full

    async def _send(self, entries: Sequence[NewEntry]) -> list[Any]:
        """Append entries and return a reply for each; errors are replies, except the connection's.

        An inbox is made by its owner, whose heartbeats keep it. One that is missing is made here with a time
        to live, since its owner may be gone for good: a sender that does not know it yet must not bring its
        stream back for ever.
        """
        due = list(dict.fromkeys(stream for stream, _ in entries if self._bounds.is_due(stream)))
        async with self._client.pipeline(transaction=False) as pipe:
            for stream, fields in entries:
                pipe.xadd(stream, cast("dict[Any, Any]", fields), nomkstream=self._is_inbox(stream))
            for stream in due:
                pipe.xlen(stream)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
        if all(isinstance(each, RedisError) and is_passing(each) for each in replies):
            raise replies[0]  # of a cluster, which answers for each of its servers
        for stream, num_entries in zip(due, replies[len(entries) :], strict=True):
            if not isinstance(num_entries, RedisError):
                self._bounds.saw(stream, num_entries)
        missing = [index for index in range(len(entries)) if replies[index] is None]
        if missing:
            async with self._client.pipeline(transaction=False) as pipe:
                for index in missing:
                    pipe.xadd(entries[index][0], cast("dict[Any, Any]", entries[index][1]))
                for index in missing:
                    pipe.expire(entries[index][0], INBOX_TTL_S)
                replies_now = await pipe.execute(raise_on_error=False)
            for index, reply in zip(missing, replies_now, strict=False):
                replies[index] = reply
        return replies[: len(entries)]


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, str):
        return value
    raise BusUnavailableError(f"Redis answered {type(value).__name__} where an entry id was due")
