"""What a checksum says about a sealed entry, and what comes of it. Pure.

The bytes are read between the two steps, while the store goes on: `is_readable` chooses, `judge` looks at
the outcome. A sealed entry does not change, and one that was freed meanwhile stays FREED for ever, so its
state afterwards says whether its checksum counts.
"""

from dataclasses import dataclass, field

from triptych_cache_store.core.state import StoreState
from triptych_cache_store.entries.entry_table import Entry, EntryState
from triptych_common.protocol.store import EntryFault
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

SEALED = (EntryState.READY, EntryState.PINNED)


@dataclass(slots=True)
class Report:
    """What a look at some entries found."""

    num_intact: int = 0
    num_recorded: int = 0
    num_gone: int = 0
    num_bytes: int = 0
    damaged: list[EntryFault] = field(default_factory=list)


@dataclass(slots=True)
class ChecksumPass:
    """One look at some entries. `evict`: damaged ones do not live on."""

    state: StoreState
    evict: bool
    report: Report = field(default_factory=Report)

    def is_readable(self, entry: Entry) -> bool:
        """Still there, with a header that is right: its bytes may be read now, to `judge` it later."""
        if entry.state not in SEALED:
            self.report.num_gone += 1
            return False
        if not self.state.journal.bears_out(entry):
            self._found_damage(entry, EntryFault(mm_hash=entry.mm_hash, fault="header"))
            return False
        return True

    def judge(self, entry: Entry, checksum: int) -> None:
        """`checksum` is that of the bytes that were read."""
        if entry.state not in SEALED:
            self.report.num_gone += 1
            return
        self.report.num_bytes += entry.spec.num_bytes
        known = self.state.journal.checksum_of(entry)
        if known is None:
            self.state.journal.checksummed(entry, checksum)
            self.report.num_recorded += 1
        elif known == checksum:
            self.report.num_intact += 1
        else:
            self._found_damage(entry, EntryFault(mm_hash=entry.mm_hash, fault="checksum"))

    def _found_damage(self, entry: Entry, fault: EntryFault) -> None:
        log.error("entry is damaged", mm_hash=fault.mm_hash, fault=fault.fault, num_pins=entry.num_pins)
        self.report.damaged.append(fault.model_copy(update={"num_pins": entry.num_pins}))
        if self.evict and entry.state is EntryState.READY:
            self.state.space.evict(entry)
        elif self.evict:
            entry.is_damaged = True  # in use: it goes with its last pin
