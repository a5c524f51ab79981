"""Stores that an item can be taken from, the best first. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.transfers import EntryPlace
from triptych_gateway.locality.item_places import ItemPlace
from triptych_gateway.transfers.fabric_view import FabricView
from triptych_gateway.transfers.link_rates import LinkRates

Places = Mapping[MmHash, Sequence[EntryPlace]]
"""Directory's places by entry. A requested entry without any has an empty list."""


@dataclass(frozen=True, slots=True)
class TransferSource:
    """Store that has all of an item, or will have."""

    store: str
    num_bytes: int
    is_sealed: bool  # now; else an encoder is at it
    is_new: bool  # True: reported by an encoder; else by the directory


def merge_places(found: Iterable[Sequence[EntryPlace]]) -> tuple[EntryPlace, ...]:
    """Merge several reads of one entry's places, each place once."""
    places = {(each.store, each.generation): each for each in chain.from_iterable(found)}
    return tuple(places.values())


def living_places(places: Places, entries: Collection[MmHash], fabric: FabricView) -> dict[str, int]:
    """Return stores that have all of `entries` in their present generation, with the bytes of all."""
    by_store: dict[str, list[int]] = {}
    for entry in entries:
        for place in places.get(entry, ()):
            if not fabric.is_dead(place):
                by_store.setdefault(place.store, []).append(place.num_bytes)
    return {store: sum(sizes) for store, sizes in by_store.items() if len(sizes) == len(entries)}


def find_sources(
    target: str,
    known: ItemPlace | None,
    places: Places,
    entries: Sequence[MmHash],
    fabric: FabricView,
    rates: LinkRates,
    now: float,
) -> list[TransferSource]:
    """Return `target` itself if it has the item, then the stores to push it from, the best first.

    Stores whose agent takes orders come before the others, working links before recently failed ones, sealed
    items before others, and faster before slower. An avoided link is better than none.
    """
    found = {
        store: TransferSource(store, num_bytes, is_sealed=True, is_new=False)
        for store, num_bytes in living_places(places, entries, fabric).items()
    }
    if known is not None and (known.store not in found or known.is_sealed):
        found[known.store] = TransferSource(known.store, known.num_bytes, known.is_sealed, is_new=True)

    def rank(each: TransferSource) -> tuple[bool, bool, bool, bool, float, str]:
        link = (each.store, target)
        seconds = rates.seconds(link, each.num_bytes, now)
        return (
            each.store != target,
            fabric.agent_of(each.store) is None,  # its host has ended, or is about to
            rates.is_avoided(link, now),
            not each.is_sealed,
            seconds,
            each.store,
        )

    return sorted(found.values(), key=rank)
