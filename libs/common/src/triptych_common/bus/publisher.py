"""Append entries to streams within their bounds, in one round trip that also returns each stream's length."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from triptych_common.bus.stream_bounds import StreamBounds
from triptych_common.domain.errors import BusUnavailableError, StreamFullError
from triptych_common.protocol.names import INBOX_TTL_S
from triptych_common.redis_client.commands import run_command, send_command
from triptych_common.redis_client.failures import unavailable

NewEntry = tuple[str, Mapping[bytes, bytes]]


@dataclass(frozen=True)
class RefusedEntry:
    """An entry that was not appended."""

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
        """Append one entry and return its id."""
        if stream in await self._find_full([stream]):
            raise self._bounds.error(stream)
        replies = await run_command("publish", lambda: self._send([(stream, fields)], [stream]))
        for reply in replies:
            if isinstance(reply, RedisError):
                raise unavailable("publish", reply)
        entry_id, num_entries = replies
        self._bounds.saw(stream, num_entries)
        return _text(entry_id)

    async def append_all(self, entries: Sequence[NewEntry]) -> list[RefusedEntry]:
        """Append `entries` without a retry; return the refused ones."""
        streams = list(dict.fromkeys(stream for stream, _ in entries))
        full = await self._find_full(streams)
        wanted = [entry for entry in entries if entry[0] not in full]
        open_streams = [stream for stream in streams if stream not in full]
        replies: list[Any] = []
        if wanted:
            replies = await run_command("publish", lambda: self._send(wanted, open_streams), retry_for_s=0)
        for stream, num_entries in zip(open_streams, replies[len(wanted) :], strict=True):
            if not isinstance(num_entries, RedisError):
                self._bounds.saw(stream, num_entries)
        errors = {
            id(entry): unavailable("publish", reply)
            for entry, reply in zip(wanted, replies, strict=False)
            if isinstance(reply, RedisError)
        }
        errors |= {id(entry): self._bounds.error(entry[0]) for entry in entries if entry[0] in full}
        return [RefusedEntry(entry, errors[id(entry)]) for entry in entries if id(entry) in errors]

    async def length(self, stream: str) -> int:
        """Return the number of entries in `stream`."""
        length: int = await run_command("stream_length", lambda: send_command(self._client, "XLEN", stream))
        return length

    async def _find_full(self, streams: Sequence[str]) -> set[str]:
        for stream in streams:
            if self._bounds.is_full(stream):
                self._bounds.saw(stream, await self.length(stream))
        return {stream for stream in streams if self._bounds.is_full(stream)}

    async def _send(self, entries: Sequence[NewEntry], lengths_of: Sequence[str]) -> list[Any]:
        """Append entries and read lengths; errors are part of the result, except the connection's.

        An inbox gets its time to live with every message: its owner may be gone for good, and a sender
        that does not know it yet must not bring its stream back for ever.
        """
        async with self._client.pipeline(transaction=False) as pipe:
            for stream, fields in entries:
                pipe.xadd(stream, cast("dict[Any, Any]", fields))
            for stream in lengths_of:
                pipe.xlen(stream)
            for stream in filter(self._is_inbox, lengths_of):
                pipe.expire(stream, INBOX_TTL_S)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
        return replies[: len(entries) + len(lengths_of)]


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, str):
        return value
    raise BusUnavailableError(f"Redis answered {type(value).__name__} where an entry id was due")
