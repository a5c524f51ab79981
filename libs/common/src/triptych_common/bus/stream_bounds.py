"""Bounds of the number of entries in a stream, so that memory in Redis stays bounded if a reader stops.

A stream of one instance grows only while its reader has stopped (handled entries are deleted). It is
never trimmed, since unread entries would be lost silently: it is full, and publishers get an error. A
publisher reads a stream's length once in `LOOK_EVERY` entries, so the bound is soft by that many of each.

Streams of jobs have a bound of their own, at the gateway, with an answer for the caller; `dead-letters` is
trimmed.
"""

from collections.abc import Callable

from triptych_common.domain.errors import StreamFullError

MAX_STREAM_ENTRIES = 10_000
LOOK_EVERY = 100
MAX_REMEMBERED = 1000  # streams; those of instances that are gone are not told apart
DEAD_LETTERS_MAX_ENTRIES = 10_000


class StreamBounds:
    """Streams that were full at the last check."""

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
