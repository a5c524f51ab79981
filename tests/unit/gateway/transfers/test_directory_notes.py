"""Notes for the directory: written in the background, in order, bounded; a bus that is away is no failure."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from tests.support.waiting import until
from triptych_common.coordination import NotedPlace
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.transfers import EntryPlace
from triptych_gateway.transfers.place_finder import MAX_BATCH, MAX_UNWRITTEN, DirectoryNotes


def noted(number: int) -> NotedPlace:
    return NotedPlace(MmHash(f"{number:064x}"), EntryPlace(store="s", generation=1, num_bytes=1))


class FakeDirectory:
    def __init__(self) -> None:
        self.written: list[tuple[str, int]] = []  # what, of how many
        self.is_away = False
        self.places: dict[MmHash, tuple[EntryPlace, ...]] = {}
        self.hangs = self.is_removing = False
        self.before_remove: asyncio.Event | None = None
        self.during_find: Callable[[], None] | None = None

    def _check(self) -> None:
        if self.is_away:
            raise BusUnavailableError("away")

    async def find(self, mm_hashes: Sequence[MmHash]) -> dict[MmHash, tuple[EntryPlace, ...]]:
        self._check()
        if self.during_find is not None:
            self.during_find()
        if self.hangs:
            await asyncio.Event().wait()
        return {each: self.places[each] for each in mm_hashes if each in self.places}

    async def add(self, noted: Sequence[NotedPlace]) -> None:
        self._check()
        self.written.append(("add", len(noted)))

    async def remove(self, noted: Sequence[NotedPlace]) -> None:
        self._check()
        self.is_removing = True
        if self.before_remove is not None:
            await self.before_remove.wait()
        self.written.append(("remove", len(noted)))


@pytest.fixture
def directory() -> FakeDirectory:
    return FakeDirectory()


@asynccontextmanager
async def running(directory: FakeDirectory, timeout_s: float = 5.0) -> AsyncIterator[DirectoryNotes]:
    notes = DirectoryNotes(directory, timeout_s)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(notes.run())
        yield notes
        task.cancel()


async def test_what_is_removed_goes_before_what_is_added(directory: FakeDirectory) -> None:
    async with running(directory) as notes:
        notes.add([noted(1), noted(2)])
        notes.remove([noted(3)])
        await until(lambda: len(directory.written) == 2)
    assert directory.written == [("remove", 1), ("add", 2)]


async def test_many_are_written_in_parts_and_too_many_are_forgotten(directory: FakeDirectory) -> None:
    async with running(directory) as notes:
        notes.add(map(noted, range(MAX_UNWRITTEN + 7)))
        await until(lambda: sum(number for _, number in directory.written) == MAX_UNWRITTEN)
    assert max(number for _, number in directory.written) == MAX_BATCH


async def test_without_redis_notes_are_lost_and_the_next_ones_written(directory: FakeDirectory) -> None:
    async with running(directory) as notes:
        directory.is_away = True
        notes.add([noted(1)])
        assert await notes.find([noted(1).mm_hash]) == {}
        await asyncio.sleep(0)
        directory.is_away = False
        notes.add([noted(2)])
        await until(lambda: directory.written)


async def test_every_entry_that_was_asked_for_has_its_places(directory: FakeDirectory) -> None:
    directory.places = {noted(1).mm_hash: (noted(1).place,)}
    async with running(directory, timeout_s=0.05) as notes:
        found = await notes.find([noted(1).mm_hash, noted(2).mm_hash])
        assert found == {noted(1).mm_hash: (noted(1).place,), noted(2).mm_hash: ()}
        directory.hangs = True
        assert await notes.find([noted(1).mm_hash]) == {}


async def test_what_is_to_be_removed_is_found_no_more(directory: FakeDirectory) -> None:
    """Whether its removal waits, is on its way, or comes while Redis is asked."""
    place = noted(1).place
    directory.places = {noted(1).mm_hash: (place,)}
    notes = DirectoryNotes(directory, 5.0)
    notes.remove([noted(1)])
    assert await notes.find([noted(1).mm_hash]) == {noted(1).mm_hash: ()}
    async with running(directory) as notes:
        directory.before_remove = asyncio.Event()
        notes.remove([noted(1)])
        await until(lambda: directory.is_removing)
        assert await notes.find([noted(1).mm_hash]) == {noted(1).mm_hash: ()}
        directory.before_remove.set()
        await until(lambda: directory.written)
        assert await notes.find([noted(1).mm_hash]) == {noted(1).mm_hash: (place,)}


async def test_of_one_place_the_last_word_counts(directory: FakeDirectory) -> None:
    """Both words are written at once: what is removed goes first."""
    notes = DirectoryNotes(directory, 5.0)
    notes.add([noted(1), noted(2)])
    notes.remove([noted(1), noted(3)])
    notes.add([noted(3)])
    directory.places = {each.mm_hash: (each.place,) for each in map(noted, range(1, 4))}
    found = await notes.find([noted(number).mm_hash for number in range(1, 4)])
    assert [len(each) for each in found.values()] == [0, 1, 1]
    async with asyncio.TaskGroup() as group:
        task = group.create_task(notes.run())
        await until(lambda: len(directory.written) == 2)
        task.cancel()
    assert directory.written == [("remove", 1), ("add", 2)]


async def test_what_comes_back_while_redis_is_asked_is_there(directory: FakeDirectory) -> None:
    directory.places = {noted(1).mm_hash: (noted(1).place,)}
    notes = DirectoryNotes(directory, 5.0)
    notes.remove([noted(1)])
    directory.during_find = lambda: notes.add([noted(1)])
    assert await notes.find([noted(1).mm_hash]) == {noted(1).mm_hash: (noted(1).place,)}
