"""DirectoryNotes: places that are to be noted in the directory, or removed; written in the background.

A note that is not written costs a transfer that nobody needed, or an encode: never an answer.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from triptych_common.coordination import EntryDirectory, NotedPlace
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.transfers import EntryPlace
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_UNWRITTEN = 4096  # entries; the oldest are forgotten
MAX_BATCH = 128


class DirectoryNotes:
    """`run` must run."""

    def __init__(self, directory: EntryDirectory, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._to_add: deque[NotedPlace] = deque(maxlen=MAX_UNWRITTEN)
        self._to_remove: deque[NotedPlace] = deque(maxlen=MAX_UNWRITTEN)
        self._has_notes = asyncio.Event()

    async def find(self, entries: Sequence[MmHash]) -> dict[MmHash, tuple[EntryPlace, ...]]:
        """Of each of `entries`: its places. Nothing for any where the bus does not answer in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._directory.find(entries)
        except (BusUnavailableError, TimeoutError) as error:
            log.warning("directory of entries not reachable", error=repr(error))
            return {}
        return {each: found.get(each, ()) for each in entries}

    def add(self, noted: Iterable[NotedPlace]) -> None:
        """The stores have these."""
        self._to_add.extend(noted)
        self._wake()

    def remove(self, noted: Iterable[NotedPlace]) -> None:
        """The stores have these no more."""
        self._to_remove.extend(noted)
        self._wake()

    def _wake(self) -> None:
        if self._to_add or self._to_remove:
            self._has_notes.set()

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self._has_notes.wait()
            added, removed = _take(self._to_add), _take(self._to_remove)
            try:
                if removed:  # first: a place of another life may be among what is added
                    await self._directory.remove(removed)
                if added:
                    await self._directory.add(added)
            except BusUnavailableError as error:
                log.warning("directory of entries not written", error=repr(error))
            if not (self._to_add or self._to_remove):
                self._has_notes.clear()


def _take(notes: "deque[NotedPlace]") -> list[NotedPlace]:
    return [notes.popleft() for _ in range(min(len(notes), MAX_BATCH))]
