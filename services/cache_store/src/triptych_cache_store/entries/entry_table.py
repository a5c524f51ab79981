"""States of entries: what each block of the region is used for, and when it may be used again.

    None --reserve--> WRITING --seal--> READY <--pin / unpin--> PINNED
                         |                `--evict--> FREED
                         `--cancel / writer gone / another sealed first--> ABANDONED --writer done--> FREED

Of one mm_hash there may be several WRITING entries (reservations), and at most one READY or PINNED.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from triptych_cache_store.entries.block_pool import BlockRange
from triptych_common.domain.errors import IllegalTransitionError
from triptych_common.domain.transitions import check_transition
from triptych_common.protocol.ids import MmHash, ReservationId
from triptych_common.protocol.store import REDIS, SHM, TensorSpec


class EntryState(StrEnum):
    WRITING = "writing"
    READY = "ready"
    PINNED = "pinned"
    ABANDONED = "abandoned"
    FREED = "freed"


ALLOWED: dict[EntryState, frozenset[EntryState]] = {
    EntryState.WRITING: frozenset({EntryState.READY, EntryState.ABANDONED}),
    EntryState.READY: frozenset({EntryState.PINNED, EntryState.FREED}),
    EntryState.PINNED: frozenset({EntryState.READY}),
    EntryState.ABANDONED: frozenset({EntryState.FREED}),
    EntryState.FREED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Entry:
    """One reservation, and after its seal the tensor of its mm_hash."""

    reservation_id: ReservationId
    mm_hash: MmHash
    spec: TensorSpec
    blocks: BlockRange
    generation: int
    namespace: str  # digest announced by the writer's session; "" when it announced none
    reserved_at: float  # monotonic seconds, as all times here
    requester_lease: int = 0  # lease id of the session that asked for the reservation
    origin_seq: int = 0  # seq of its command
    tenant: str = ""
    memory: str = SHM
    producer: str = ""  # instance that writes it; "" of an entry that was taken up again
    last_used_at: float = 0.0
    num_pins: int = 0
    sealed_at: float | None = None  # until its first pin
    is_damaged: bool = False  # a pin keeps it; it goes with the last one
    state: EntryState = EntryState.WRITING  # assigned by `EntryTable._become` alone


class EntryTable:
    """All entries, found by reservation and by mm_hash, with bytes and counts by state."""

    def __init__(self, block_num_bytes: int) -> None:
        self._block_num_bytes = block_num_bytes
        self._writing: dict[MmHash, dict[ReservationId, Entry]] = {}
        self._unsealed: dict[ReservationId, Entry] = {}  # WRITING and ABANDONED
        self._sealed: dict[MmHash, Entry] = {}  # READY and PINNED
        # Whole blocks, of the region only.
        self.num_bytes: dict[EntryState, int] = dict.fromkeys(EntryState, 0)

    # ---- finding ---------------------------------------------------------------------------------
    def find_sealed(self, mm_hash: MmHash) -> Entry | None:
        return self._sealed.get(mm_hash)

    def find_reservation(self, reservation_id: ReservationId) -> Entry | None:
        """Unsealed entry (WRITING or ABANDONED) with this id."""
        return self._unsealed.get(reservation_id)

    def is_writing(self, mm_hash: MmHash) -> bool:
        return mm_hash in self._writing

    def find_writing(self, mm_hash: MmHash) -> Entry | None:
        return next(iter(self._writing.get(mm_hash, {}).values()), None)

    def all_sealed(self) -> Iterable[Entry]:
        return self._sealed.values()

    def all_unsealed(self) -> Iterable[Entry]:
        return self._unsealed.values()

    @property
    def num_entries(self) -> int:
        return len(self._sealed)

    @property
    def num_reservations(self) -> int:
        return len(self._unsealed)

    # ---- changing --------------------------------------------------------------------------------
    def add_entry(self, entry: Entry) -> None:
        """Add a new reservation in state WRITING."""
        check_transition(ALLOWED, entry.mm_hash, None, entry.state)
        if entry.reservation_id in self._unsealed:
            raise IllegalTransitionError(entry.mm_hash, None, entry.state)
        self._unsealed[entry.reservation_id] = entry
        self._writing.setdefault(entry.mm_hash, {})[entry.reservation_id] = entry
        self.num_bytes[entry.state] += self._bytes_of(entry)

    def mark_sealed(self, entry: Entry, now: float) -> None:
        """Move WRITING -> READY.

        Raises:
            IllegalTransitionError: not WRITING, or another entry of the mm_hash is sealed already.
        """
        if entry.mm_hash in self._sealed:
            raise IllegalTransitionError(entry.mm_hash, entry.state, EntryState.READY)
        self._become(entry, EntryState.READY)
        self._forget_writing(entry)
        del self._unsealed[entry.reservation_id]
        self._sealed[entry.mm_hash] = entry
        entry.last_used_at = now

    def mark_abandoned(self, entry: Entry) -> None:
        """Move WRITING -> ABANDONED; the blocks stay the writer's."""
        self._become(entry, EntryState.ABANDONED)
        self._forget_writing(entry)

    def mark_pinned(self, entry: Entry, now: float) -> None:
        """Add a pin: READY or PINNED -> PINNED."""
        if entry.state is not EntryState.PINNED:
            self._become(entry, EntryState.PINNED)
        entry.num_pins += 1
        entry.last_used_at = now

    def mark_unpinned(self, entry: Entry, now: float) -> None:
        """Remove a pin: PINNED -> PINNED, or READY after the last pin."""
        if entry.state is not EntryState.PINNED:
            raise IllegalTransitionError(entry.mm_hash, entry.state, EntryState.READY)
        if entry.num_pins == 1:
            self._become(entry, EntryState.READY)
        entry.num_pins -= 1
        entry.last_used_at = now

    def mark_freed(self, entry: Entry) -> None:
        """Move READY or ABANDONED -> FREED; the blocks may be used again."""
        was_sealed = entry.state is EntryState.READY
        self._become(entry, EntryState.FREED)
        self.num_bytes[EntryState.FREED] = 0
        if was_sealed:
            del self._sealed[entry.mm_hash]
        else:
            del self._unsealed[entry.reservation_id]

    # ---- inside ----------------------------------------------------------------------------------
    def _become(self, entry: Entry, to: EntryState) -> None:
        """Move `entry` to `to`; nothing else assigns `entry.state`.

        Raises:
            IllegalTransitionError: `to` cannot follow the entry's state.
        """
        check_transition(ALLOWED, entry.mm_hash, entry.state, to)
        self.num_bytes[entry.state] -= self._bytes_of(entry)
        self.num_bytes[to] += self._bytes_of(entry)
        entry.state = to

    def _forget_writing(self, entry: Entry) -> None:
        reservations = self._writing[entry.mm_hash]
        del reservations[entry.reservation_id]
        if not reservations:
            del self._writing[entry.mm_hash]

    def _bytes_of(self, entry: Entry) -> int:
        return entry.blocks.num_blocks * self._block_num_bytes if entry.memory in (SHM, REDIS) else 0
