"""Append entries to streams within their bounds, in one round trip."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from triptych_common.domain.errors import BusUnavailableError, StreamFullError
from triptych_common.protocol.names import INBOX_TTL_S
from triptych_common.redis_client.commands import is_passing, run_command, send_command, unavailable

MAX_STREAM_ENTRIES = 10_000
LOOK_EVERY = 100
MAX_REMEMBERED = 1000  # streams; those of instances that are gone are not told apart
DEAD_LETTERS_MAX_ENTRIES = 10_000

NewEntry = tuple[str, Mapping[bytes, bytes]]


class StreamBounds:
    """Streams that were full at the last check.

    A stream of one instance grows only while its reader has stopped (handled entries are deleted). It is
    never trimmed, since unread entries would be lost silently: it is full, and publishers get an error. A
    publisher reads a stream's length once in `LOOK_EVERY` entries, so the bound is soft by that many of each.
    Streams of jobs have a bound of their own, at the gateway, with an answer for the caller; `dead-letters`
    is trimmed.
    """

    def __init__(self, is_bounded: Callable[[str], bool]) -> None:
        self._is_bounded = is_bounded
        self._full: set[str] = set()
        self._num_unseen: dict[str, int] = {}  # entries appended since its length was read, by stream

    def is_due(self, stream: str) -> bool:
        """Count an entry that is about to be appended; return whether to read the length with it."""
        if not self._is_bounded(stream):
            return False
        if len(self._num_unseen) > MAX_REMEMBERED:
            self._num_unseen.clear()
        num_unseen = self._num_unseen.get(stream, LOOK_EVERY) + 1
        self._num_unseen[stream] = num_unseen
        return num_unseen > LOOK_EVERY

    def is_full(self, stream: str) -> bool:
        """Return whether `stream` was full, so that its length must be read before another append."""
        return stream in self._full

    def saw(self, stream: str, num_entries: int) -> None:
        self._num_unseen[stream] = 0
        if num_entries < MAX_STREAM_ENTRIES or not self._is_bounded(stream):
            self._full.discard(stream)
        else:
            self._full.add(stream)

    def error(self, stream: str) -> StreamFullError:
        return StreamFullError(
            f"{stream} holds {MAX_STREAM_ENTRIES} entries or more: its reader has stopped taking them"
        )


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
