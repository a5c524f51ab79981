"""One pass over sealed entries: take a checksum, or compare it, and decide what becomes of the entry. Pure.

The bytes are read between `is_readable` and `note_checksum`, while the store goes on.
A sealed entry does not change, and one that was freed meanwhile stays FREED for ever, so its state afterwards
decides whether its checksum counts.
"""

from dataclasses import dataclass, field

from triptych_cache_store.core.state import StoreState
from triptych_cache_store.entries.entry_table import Entry, EntryState
from triptych_common.protocol.store import EntryFault
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

SEALED = (EntryState.READY, EntryState.PINNED)


@dataclass(slots=True)
class ChecksumResult:
    """What a pass found."""

    num_intact: int = 0
    num_recorded: int = 0
    num_gone: int = 0
    num_bytes: int = 0
    damaged: list[EntryFault] = field(default_factory=list)


@dataclass(slots=True)
class ChecksumPass:
    """`evict`: damaged entries are evicted."""

    state: StoreState
    evict: bool
    result: ChecksumResult = field(default_factory=ChecksumResult)

    def is_readable(self, entry: Entry) -> bool:
        """Whether its bytes may be read now: it is still there, with a header that is right."""
        if entry.state not in SEALED:
            self.result.num_gone += 1
            return False
        if not self.state.journal.has_intact_header(entry):
            self._found_damage(entry, EntryFault(mm_hash=entry.mm_hash, fault="header"))
            return False
        return True

    def note_checksum(self, entry: Entry, checksum: int) -> None:
        """`checksum`: of the bytes that were read."""
        if entry.state not in SEALED:
            self.result.num_gone += 1
            return
        self.result.num_bytes += entry.spec.num_bytes
        known = self.state.journal.checksum_of(entry)
        if known is None:
            self.state.journal.note_checksum(entry, checksum)
            self.result.num_recorded += 1
        elif known == checksum:
            self.result.num_intact += 1
        else:
            self._found_damage(entry, EntryFault(mm_hash=entry.mm_hash, fault="checksum"))

    def _found_damage(self, entry: Entry, fault: EntryFault) -> None:
        log.error("entry is damaged", mm_hash=fault.mm_hash, fault=fault.fault, num_pins=entry.num_pins)
        self.result.damaged.append(fault.model_copy(update={"num_pins": entry.num_pins}))
        if self.evict and entry.state is EntryState.READY:
            self.state.space.evict(entry)
        elif self.evict:
            entry.is_damaged = True  # in use: it goes with its last pin
