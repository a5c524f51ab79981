"""ItemPlaces: in which store each item is or will be, from encoders' metadata."""

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
    mm_hash: MmHash
    store: str
    num_bytes: int
    num_embeds: int  # rows
    pieces: tuple[int, ...]  # rows of each; empty: the item is one entry
    is_sealed: bool
    job_id: str  # that made it, or found it

    @property
    def entries(self) -> tuple[MmHash, ...]:
        return entry_hashes(self.mm_hash, self.pieces)

    def entry_bytes(self) -> tuple[int, ...]:
        if not self.pieces:
            return (self.num_bytes,)
        return tuple(self.num_bytes * rows // self.num_embeds for rows in self.pieces)


class ItemPlaces:
    """Places of recently seen items; `take_changed` returns each change once.

    With one registered store nothing is kept, and no reader wakes.
    """

    def __init__(self, are_apart: Callable[[], bool]) -> None:
        """Store the check for several registered stores."""
        self._are_apart = are_apart
        self._known: LRUCache[MmHash, ItemPlace] = LRUCache(MAX_KNOWN)
        self._changed: dict[MmHash, None] = {}  # bounded by `_known`
        self._has_changed = asyncio.Event()

    def find(self, mm_hash: MmHash) -> ItemPlace | None:
        return self._known.get(mm_hash)

    def note_metadata(self, message: EncoderCacheMetadata, *, is_copy: bool = False) -> None:
        """Record that an encoder makes the item at its store, or has found it there.

        `is_copy`: the metadata are the flight's copy, perhaps of a dead encoder; known facts of the same job
        win.
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
        """Record that the item is complete there, unless another job has made it since."""
        known = self._known.get(mm_hash)
        if known is not None and known.job_id == job_id and not known.is_sealed:
            self._note(replace(known, is_sealed=True))

    def forget(self, mm_hash: MmHash, store: str) -> None:
        known = self._known.get(mm_hash)
        if known is not None and known.store == store:
            del self._known[mm_hash]

    def take_changed(self) -> list[ItemPlace]:
        changed, self._changed = self._changed, {}
        self._has_changed.clear()
        return [place for each in changed if (place := self._known.get(each)) is not None]

    async def wait_changed(self) -> None:
        await self._has_changed.wait()

    def _note(self, place: ItemPlace) -> None:
        self._known[place.mm_hash] = place
        self._changed[place.mm_hash] = None
        self._has_changed.set()
