"""ItemPlaces: at which store encoders make items, or have found them, as this gateway was told."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from cachetools import LRUCache

from triptych_common.domain.hashing import entry_hashes
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncoderCacheMetadata

MAX_KNOWN = 8192  # items


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """By the latest metadata of the item."""

    mm_hash: MmHash
    store: str
    num_bytes: int
    num_embeds: int  # rows
    pieces: tuple[int, ...]  # rows of each; empty: the item is one entry
    is_sealed: bool
    job_id: str  # that made it, or found it

    @property
    def entries(self) -> tuple[MmHash, ...]:
        """Under which it lies in the store."""
        return entry_hashes(self.mm_hash, self.pieces)

    def entry_bytes(self) -> tuple[int, ...]:
        """Of each entry."""
        if not self.pieces:
            return (self.num_bytes,)
        return tuple(self.num_bytes * rows // self.num_embeds for rows in self.pieces)


class ItemPlaces:
    """Knows the items of late; of each change it tells once (`take_changed`).

    Where one store is registered nothing is kept, and nothing wakes.
    """

    def __init__(self, are_apart: Callable[[], bool]) -> None:
        """`are_apart`: several stores are registered."""
        self._are_apart = are_apart
        self._known: LRUCache[MmHash, ItemPlace] = LRUCache(MAX_KNOWN)
        self._changed: dict[MmHash, None] = {}  # bounded by what is known
        self._has_changed = asyncio.Event()

    def find(self, mm_hash: MmHash) -> ItemPlace | None:
        return self._known.get(mm_hash)

    def note_metadata(self, message: EncoderCacheMetadata, *, is_copy: bool = False) -> None:
        """An encoder makes the item at its store, or has found it there.

        `is_copy`: as its flight keeps them, perhaps of an encoder that has died since. What is known of the
        same job already counts more.
        """
        if not self._are_apart():
            return
        mm_hash = MmHash(message.mm_hash)
        before = self._known.get(mm_hash)
        if is_copy and before is not None and before.job_id == message.job_id:
            return
        is_sealed = message.sealed or (
            before is not None
            and (before.store, before.job_id) == (message.store, message.job_id)
            and before.is_sealed
        )
        self._note(
            ItemPlace(
                mm_hash,
                message.store,
                message.num_bytes,
                message.num_embeds,
                message.record.pieces,
                is_sealed,
                message.job_id,
            )
        )

    def note_sealed(self, mm_hash: MmHash, job_id: str) -> None:
        """It is whole there; nothing, if another job has made it, or makes it, since."""
        known = self._known.get(mm_hash)
        if known is not None and known.job_id == job_id and not known.is_sealed:
            self._note(replace(known, is_sealed=True))

    def forget(self, mm_hash: MmHash, store: str) -> None:
        """That store says that it has not got it."""
        known = self._known.get(mm_hash)
        if known is not None and known.store == store:
            del self._known[mm_hash]

    def take_changed(self) -> list[ItemPlace]:
        """Those that have changed since the last time."""
        changed, self._changed = self._changed, {}
        self._has_changed.clear()
        return [place for each in changed if (place := self._known.get(each)) is not None]

    async def wait_changed(self) -> None:
        await self._has_changed.wait()

    def _note(self, place: ItemPlace) -> None:
        self._known[place.mm_hash] = place
        self._changed[place.mm_hash] = None
        self._has_changed.set()
