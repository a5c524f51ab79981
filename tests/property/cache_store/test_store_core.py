"""The store's logic as a state machine (`store_machine`), with the bytes that it guards.

More of it: `pytest --hypothesis-profile=long tests/property/cache_store/test_store_core.py`.
"""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.property.cache_store.store_machine import SESSIONS, StoreMachine
from tests.support.examples import examples
from triptych_cache_store.checksums.verifier import ChecksumPass, Checksums
from triptych_cache_store.entries.entry_table import Entry, EntryState
from triptych_cache_store.entries.leases import SessionId
from triptych_common.protocol import store as wire
from triptych_common.protocol.ids import ReservationId


@dataclass(frozen=True)
class Reading:
    """A pass over all entries, between its two steps: checksums are computed, and not noted yet."""

    checksum_pass: ChecksumPass
    checksums: list[tuple[Entry, int]]
    contents: dict[int, bytes]  # reservation -> what was read


class BytesMachine(StoreMachine):
    """With writers that write whenever they may, memory that goes bad, and checksum passes meanwhile.

    After every step every sealed entry holds the bytes that its writer sealed, or that went bad since.
    """

    def __init__(self) -> None:
        self.contents: dict[int, bytes] = {}  # reservation of a sealed entry -> what must be there
        self.checked: dict[int, bytes] = {}  # ... -> what was there when its checksum was taken
        self.reading: Reading | None = None
        self.num_writes = 0
        super().__init__()

    # ---- writing ---------------------------------------------------------------------------------
    def write(self, reservation: ReservationId) -> None:
        _, offset, num_bytes = self.orders[reservation]
        self.num_writes += 1
        self.region[offset : offset + num_bytes] = bytes([self.num_writes % 256]) * num_bytes

    def written(self, reservation: ReservationId) -> None:
        _, offset, num_bytes = self.orders[reservation]
        super().written(reservation)
        sealed = {entry.reservation_id for entry in self.core.table.all_sealed()}
        if reservation in sealed:
            self.contents[reservation] = bytes(self.region[offset : offset + num_bytes])

    @precondition(lambda self: self.orders)
    @rule(data=st.data())
    def write_at_any_time(self, data: st.DataObject) -> None:
        """Also with the reservation cancelled by another, the connection broken, the store restarted."""
        self.write(data.draw(st.sampled_from(sorted(self.orders))))

    # ---- checking --------------------------------------------------------------------------------
    @precondition(lambda self: self.contents)
    @rule(data=st.data(), at_end=st.booleans())
    def go_bad(self, data: st.DataObject, at_end: bool) -> None:
        entries = {entry.mm_hash: entry for entry in self.core.table.all_sealed()}
        if entries:
            entry = entries[data.draw(st.sampled_from(sorted(entries)))]
            start = self.layout.offset_of(entry.blocks.start)
            self.region[start + (entry.spec.num_bytes - 1 if at_end else 0)] ^= 0xFF
            self.contents[entry.reservation_id] = self.bytes_of(entry)

    @precondition(lambda self: self.reading is None)
    @rule(session=SESSIONS, evict=st.booleans())
    def verify(self, session: SessionId, evict: bool) -> None:
        """Both steps at once."""
        self.begin_to_verify(session, evict)
        if self.reading is not None:
            self.note_checksums()

    @precondition(lambda self: self.reading is None)
    @rule(session=SESSIONS, evict=st.booleans())
    def begin_to_verify(self, session: SessionId, evict: bool) -> None:
        """What the verifier's thread reads; until it is noted, anything may happen."""
        answers = self.handle(session, wire.Verify(seq=0, evict=evict))
        if session not in self.live:
            assert isinstance(answers[0].reply, wire.StoreFailure)
            return
        assert answers == []
        request = self.core.state.verify_queue.requests.popleft()
        assert (request.session_id, request.command.evict) == (session, evict)
        checksum_pass = ChecksumPass(self.core.state, evict)
        entries = list(self.core.table.all_sealed())
        assert all(checksum_pass.is_readable(entry) for entry in entries)
        checksums = Checksums(memoryview(self.region), self.layout).compute(entries)
        assert checksums is not None
        contents = {entry.reservation_id: self.bytes_of(entry) for entry in entries}
        self.reading = Reading(checksum_pass, list(zip(entries, checksums, strict=True)), contents)

    @precondition(lambda self: self.reading is not None)
    @rule()
    def note_checksums(self) -> None:
        assert self.reading is not None
        checksum_pass, evict = self.reading.checksum_pass, self.reading.checksum_pass.evict
        for entry, checksum in self.reading.checksums:
            number, before, num_damaged = entry.reservation_id, entry.state, len(checksum_pass.result.damaged)
            read = self.reading.contents[number]
            is_damaged = before is not EntryState.FREED and self.checked.get(number, read) != read
            checksum_pass.note_checksum(entry, checksum)
            if before is not EntryState.FREED:
                self.checked.setdefault(number, read)
            assert len(checksum_pass.result.damaged) - num_damaged == is_damaged
            is_gone = is_damaged and evict and before is EntryState.READY
            assert entry.state is (EntryState.FREED if is_gone else before)
            assert entry.is_damaged or not (is_damaged and evict and before is EntryState.PINNED)
        self.reading = None

    def start_store(self, *, checks: bool = False) -> None:
        self.reading = None
        super().start_store(checks=checks)

    def survives(self, entry: Entry, checks: bool) -> bool:
        is_held = any(mm_hash == entry.mm_hash for _, mm_hash, _ in self.held.values())
        now = self.contents[entry.reservation_id]
        return is_held or not checks or self.checked.get(entry.reservation_id, now) == now

    def bytes_of(self, entry: Entry) -> bytes:
        start = self.layout.offset_of(entry.blocks.start)
        return bytes(self.region[start : start + entry.spec.num_bytes])

    # ---- invariants ------------------------------------------------------------------------------
    @invariant()
    def no_writer_has_a_sealed_entry(self) -> None:
        for entry in self.core.table.all_sealed():
            assert self.bytes_of(entry) == self.contents[entry.reservation_id]

    @invariant()
    def every_writer_has_blocks_of_its_own(self) -> None:
        unsealed = {entry.reservation_id: entry for entry in self.core.table.all_unsealed()}
        for reservation, (_, offset, _) in self.orders.items():
            assert self.layout.offset_of(unsealed[reservation].blocks.start) == offset

    @invariant()
    def what_is_damaged_goes_with_its_last_pin(self) -> None:
        for entry in self.core.table.all_sealed():
            assert not entry.is_damaged or entry.state is EntryState.PINNED


TestStore = BytesMachine.TestCase
TestStore.settings = settings(max_examples=examples(250), stateful_step_count=100)
