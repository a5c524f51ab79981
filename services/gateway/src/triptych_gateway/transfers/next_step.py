"""Next step of a waiting transfer, and the stores that its item can be taken from, the best first. Pure.

the target has the item                     HOLD
attempts left, a source that was not tried  ORDER from it
attempts left, an encode is under way       WAIT: its metadata, or its seal, come
attempts left, none of that                 LOOK_UP where it is now, once after each order that failed
attempts left, and it is nowhere            ENCODE again: near the target at first, then anywhere
no attempt left                             GIVE_UP

The last attempt is not for a place of the directory: an encode can be had instead.
If the target's own prefill_decode misses an item, only an encoder's report counts as its presence, not the
directory's.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain

from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.transfers import EntryPlace
from triptych_gateway.locality.item_places import ItemPlace
from triptych_gateway.transfers.fabric_view import FabricView, LinkRates
from triptych_gateway.transfers.transfer_table import Transfer

Places = Mapping[MmHash, Sequence[EntryPlace]]
"""Directory's places by entry. A requested entry without any has an empty list."""


@dataclass(frozen=True, slots=True)
class TransferSource:
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


class StepKind(Enum):
    HOLD = auto()
    ORDER = auto()
    WAIT = auto()
    LOOK_UP = auto()
    ENCODE = auto()
    GIVE_UP = auto()


@dataclass(frozen=True, slots=True)
class TransferStep:
    kind: StepKind
    source: TransferSource | None = None  # ORDER
    near: str | None = None  # ENCODE: the store whose encoders come first; None: any


def next_step(
    transfer: Transfer, sources: Sequence[TransferSource], *, is_encoding: bool, max_attempts: int
) -> TransferStep:
    """Return the next step; `sources` are the best first, with the target itself if it has the item.

    A transfer that nothing has failed of yet encodes nothing: its item is ordered by the request, or by its
    `EncodeNeeded`.
    """
    if any(each.store == transfer.target and (each.is_new or not transfer.is_missed) for each in sources):
        return TransferStep(StepKind.HOLD)
    if transfer.num_attempts >= max_attempts:
        return TransferStep(StepKind.GIVE_UP)
    fresh = [each for each in sources if each.store not in (transfer.target, *transfer.tried)]
    if 0 < transfer.num_attempts == max_attempts - 1:
        fresh = [each for each in fresh if each.is_new]
    if fresh:
        return TransferStep(StepKind.ORDER, fresh[0])
    if is_encoding or not transfer.num_attempts:
        return TransferStep(StepKind.WAIT)
    if not transfer.is_looked_up:
        return TransferStep(StepKind.LOOK_UP)
    return TransferStep(StepKind.ENCODE, near=None if transfer.num_encodes else transfer.target)
