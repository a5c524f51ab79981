"""PlaceFinder: places of items, from encoders' messages and the directory."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from triptych_common.coordination import NotedPlace
from triptych_common.domain.hashing import entry_hashes
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.transfers import EntryPlace
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.locality.item_places import ItemPlace
from triptych_gateway.transfers.directory_notes import DirectoryNotes
from triptych_gateway.transfers.fabric_view import FabricView
from triptych_gateway.transfers.item_sources import (
    Places,
    TransferSource,
    find_sources,
    living_places,
    merge_places,
)
from triptych_gateway.transfers.link_rates import LinkRates


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
        self, item: MmHash, target: str, media_waits: Iterable[MediaWait], now: float
    ) -> list[TransferSource]:
        """Return the sources, the best first; `target` itself comes before all others if it has the item."""
        known, entries, waits = self._orders.places.find(item), self.entries_of(item), list(media_waits)
        places = {
            entry: merge_places(each.entry_places.get(entry, ()) for each in waits) for entry in entries
        }
        return find_sources(target, known, places, entries, self._fabric, self._rates, now)

    async def complete(self, media_wait: MediaWait, items: Sequence[MmHash], target: str | None) -> None:
        """Read the directory for those of `items` that were not read, or had no place then."""
        places, now = media_wait.entry_places, time.monotonic()
        for item in items:
            if not self.sources_of(item, target or "", [media_wait], now):
                for entry in self.entries_of(item):
                    places.pop(entry, None)
        places.update(await self.read(items, places))

    async def look_up(self, needed: Iterable[tuple[MmHash, Sequence[MediaWait]]]) -> None:
        """Read the directory again, for items and the requests that wait for each: one round trip."""
        items = list(needed)
        found = await self.read([item for item, _ in items])
        for item, media_waits in items:
            places = {entry: found[entry] for entry in self.entries_of(item) if entry in found}
            for media_wait in media_waits:
                media_wait.entry_places.update(places)

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

    def forget(self, item: MmHash, store: str, media_waits: Iterable[MediaWait]) -> None:
        """Record that `store` has the item no more, and that no encoder makes it there."""
        entries = self.entries_of(item)
        self._orders.places.forget(item, store)
        for entry in entries:
            for each in media_waits:
                places = each.entry_places.get(entry, ())
                each.entry_places[entry] = tuple(place for place in places if place.store != store)
            generation = self._fabric.generation_of(store)
            if generation is not None:
                place = EntryPlace(store=store, generation=generation, num_bytes=1)
                self._notes.remove([NotedPlace(entry, place)])

    def _note(self, store: str, entries: Iterable[tuple[MmHash, int]]) -> None:
        """Note that a store has these entries; a store without a fabric agent is no source and is skipped."""
        generation = self._fabric.generation_of(store)
        if generation is not None and self._fabric.are_apart:
            self._notes.add(
                NotedPlace(entry, EntryPlace(store=store, generation=generation, num_bytes=max(1, num_bytes)))
                for entry, num_bytes in entries
            )
