"""DirectoryNotes: places to add to the directory or remove, written in the background.

A lost note costs a needless transfer or an encode, never an answer.
"""

import asyncio
from collections.abc import Iterable, Sequence

from triptych_common.coordination import EntryDirectory, NotedPlace
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.transfers import EntryPlace
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_UNWRITTEN = 4096  # entries; the oldest are forgotten
MAX_BATCH = 128

_Key = tuple[MmHash, str, int]  # entry, store, generation
_Notes = dict[_Key, NotedPlace]  # the oldest first


class DirectoryNotes:
    """Notes to write; `run` must run. The last note about a place counts: it is in one of two lists."""

    def __init__(self, directory: EntryDirectory, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._to_add: _Notes = {}
        self._to_remove: _Notes = {}
        self._being_added: _Notes = {}
        self._being_removed: _Notes = {}
        self._has_notes = asyncio.Event()

    async def find(self, entries: Sequence[MmHash]) -> dict[MmHash, tuple[EntryPlace, ...]]:
        """Return the places of each entry; none if the bus does not answer in time.

        A place that is to be removed counts as removed, whether Redis knows that yet or not.
        """
        gone = self._unwritten_removals()
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._directory.find(entries)
        except (BusUnavailableError, TimeoutError) as error:
            log.warning("directory of entries not reachable", error=repr(error))
            return {}
        gone = (gone | self._unwritten_removals()) - self._being_added.keys() - self._to_add.keys()
        return {
            each: tuple(place for place in found.get(each, ()) if _key(each, place) not in gone)
            for each in entries
        }

    def _unwritten_removals(self) -> set[_Key]:
        return (self._being_removed.keys() | self._to_remove.keys()) - self._to_add.keys()

    def add(self, noted: Iterable[NotedPlace]) -> None:
        """Note that the stores have these entries."""
        _put(noted, self._to_add, instead_of=self._to_remove)
        self._wake()

    def remove(self, noted: Iterable[NotedPlace]) -> None:
        """Note that the stores have these entries no more."""
        _put(noted, self._to_remove, instead_of=self._to_add)
        self._wake()

    def _wake(self) -> None:
        if self._to_add or self._to_remove:
            self._has_notes.set()

    async def run(self) -> None:
        """Write notes to the directory, for ever."""
        while True:
            await self._has_notes.wait()
            added, removed = _take(self._to_add), _take(self._to_remove)
            self._being_added, self._being_removed = added, removed
            try:
                if removed:  # first: a place of an earlier generation may be among the added ones
                    await self._directory.remove(list(removed.values()))
                if added:
                    await self._directory.add(list(added.values()))
            except BusUnavailableError as error:
                log.warning("directory of entries not written", error=repr(error))
            self._being_added, self._being_removed = {}, {}
            if not (self._to_add or self._to_remove):
                self._has_notes.clear()


def _key(mm_hash: MmHash, place: EntryPlace) -> _Key:
    return mm_hash, place.store, place.generation


def _put(noted: Iterable[NotedPlace], notes: _Notes, *, instead_of: _Notes) -> None:
    for each in noted:
        key = _key(each.mm_hash, each.place)
        instead_of.pop(key, None)
        notes.pop(key, None)
        notes[key] = each
        if len(notes) > MAX_UNWRITTEN:
            del notes[next(iter(notes))]


def _take(notes: _Notes) -> _Notes:
    keys = list(notes)[:MAX_BATCH]
    return {key: notes.pop(key) for key in keys}
