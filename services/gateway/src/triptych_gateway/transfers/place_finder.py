"""PlaceFinder: places of items, from encoders' messages and the directory, which it keeps up to date."""

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from triptych_common.coordination import EntryDirectory, NotedPlace
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.domain.hashing import entry_hashes
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.transfers import EntryPlace
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.locality.item_places import ItemPlace
from triptych_gateway.transfers.fabric_view import FabricView, LinkRates
from triptych_gateway.transfers.next_step import (
    Places,
    TransferSource,
    find_sources,
    living_places,
    merge_places,
)

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


class PlaceFinder:
    """Finder of places, without calls to Redis while one store is registered."""

    def __init__(
        self, fabric: FabricView, orders: EncodeOrders, notes: DirectoryNotes, rates: LinkRates
    ) -> None:
        self._fabric = fabric
        self._orders = orders
        self._notes = notes
        self._rates = rates

    # ---- for requests ----------------------------------------------------------------------------
    async def read(
        self, items: Iterable[MmHash], known: Places | None = None
    ) -> dict[MmHash, tuple[EntryPlace, ...]]:
        """Read the directory for the entries of `items` that are not in `known`: one round trip."""
        if not self._fabric.are_apart:
            return {}
        entries = dict.fromkeys(chain.from_iterable(self.entries_of(each) for each in items))
        lacking = [each for each in entries if each not in (known or {})]
        if not lacking:
            return {}
        found = await self._notes.find(lacking)
        self._notes.remove(
            NotedPlace(entry, place)
            for entry, places in found.items()
            for place in places
            if self._fabric.generation_of(place.store) not in (None, place.generation)
        )
        return found

    def stores_of(self, items: Collection[MmHash], places: Places) -> Mapping[str, frozenset[MmHash]]:
        """Return which of `items` each store has, or gets from its own encoder, to choose an instance by."""
        if not self._fabric.are_apart:
            return {}
        near: dict[str, set[MmHash]] = {}
        for item in items:
            known = self._orders.places.find(item)
            stores = set(living_places(places, self.entries_of(item), self._fabric))
            if known is not None:
                stores.add(known.store)
            for store in stores:
                near.setdefault(store, set()).add(item)
        return {store: frozenset(held) for store, held in near.items()}

    # ---- for transfers ---------------------------------------------------------------------------
    def entries_of(self, item: MmHash) -> tuple[MmHash, ...]:
        """Return the entries of an item in a store; one, if its sizes are unknown here."""
        known = self._orders.places.find(item)
        if known is not None:
            return known.entries
        sizes = self._orders.sizes.get_local(item)
        return entry_hashes(item, () if sizes is None else sizes.record.pieces)

    def sources_of(
        self, item: MmHash, target: str, item_waits: Iterable[ItemWait], now: float
    ) -> list[TransferSource]:
        """Return the sources, the best first; `target` itself comes before all others if it has the item."""
        known, entries, waits = self._orders.places.find(item), self.entries_of(item), list(item_waits)
        places = {
            entry: merge_places(each.entry_places.get(entry, ()) for each in waits) for entry in entries
        }
        return find_sources(target, known, places, entries, self._fabric, self._rates, now)

    async def complete(self, item_wait: ItemWait, items: Sequence[MmHash], target: str | None) -> None:
        """Read the directory for those of `items` that were not read, or had no place then."""
        now = time.monotonic()
        lacking = [each for each in items if not self.sources_of(each, target or "", [item_wait], now)]
        entries = chain.from_iterable(map(self.entries_of, lacking))
        item_wait.on_entries_read(dict.fromkeys(entries, ()))
        item_wait.on_entries_read(await self.read(items, item_wait.entry_places))

    async def look_up(self, needed: Iterable[tuple[MmHash, Sequence[ItemWait]]]) -> None:
        """Read the directory again, for items and the requests that wait for each: one round trip."""
        items = list(needed)
        found = await self.read([item for item, _ in items])
        for item, item_waits in items:
            places = {entry: found[entry] for entry in self.entries_of(item) if entry in found}
            for item_wait in item_waits:
                item_wait.on_entries_read(places)

    def is_encoding(self, item: MmHash) -> bool:
        """Return whether a job of the item is under way, as far as this gateway knows."""
        found = self._orders.table.get(item)
        return found is not None and found.in_flight

    # ---- what is learned -------------------------------------------------------------------------
    def note_sealed(self, place: ItemPlace) -> None:
        """Record that an encoder has the item complete at its store."""
        if place.is_sealed:
            self._note(place.store, zip(place.entries, place.entry_bytes(), strict=True))

    def note_held(self, item: MmHash, store: str, num_bytes: int) -> None:
        """Record that a transfer brought the item to `store`, with `num_bytes` of all entries together."""
        entries = self.entries_of(item)
        self._note(store, ((each, num_bytes // len(entries)) for each in entries))

    def forget(self, item: MmHash, store: str, item_waits: Iterable[ItemWait]) -> None:
        """Record that `store` has the item no more, and that no encoder makes it there."""
        entries = self.entries_of(item)
        self._orders.places.forget(item, store)
        for each in item_waits:
            each.on_store_lost(entries, store)
        generation = self._fabric.generation_of(store)
        if generation is not None:
            place = EntryPlace(store=store, generation=generation, num_bytes=1)
            self._notes.remove([NotedPlace(entry, place) for entry in entries])

    def _note(self, store: str, entries: Iterable[tuple[MmHash, int]]) -> None:
        """Note that a store has these entries; a store without a fabric agent is no source and is skipped."""
        generation = self._fabric.generation_of(store)
        if generation is not None and self._fabric.are_apart:
            self._notes.add(
                NotedPlace(entry, EntryPlace(store=store, generation=generation, num_bytes=max(1, num_bytes)))
                for entry, num_bytes in entries
            )
