import itertools

import pytest

from triptych_cache_store.entries.block_pool import BlockRange
from triptych_cache_store.entries.entry_table import Entry, EntryState, EntryTable
from triptych_common.domain.errors import IllegalTransitionError
from triptych_common.protocol.ids import MmHash, ReservationId
from triptych_common.protocol.store import TensorSpec

SPEC = TensorSpec(shape=(2, 2), dtype="float32", num_bytes=16)
HASH = MmHash("ab" * 32)
_ids = itertools.count(1)


def entry(mm_hash: MmHash = HASH) -> Entry:
    return Entry(ReservationId(next(_ids)), mm_hash, SPEC, BlockRange(0, 3), 1, "", reserved_at=1.0)


@pytest.fixture
def table() -> EntryTable:
    return EntryTable(block_num_bytes=100)


def test_only_one_entry_of_a_hash_is_sealed(table: EntryTable) -> None:
    one, two = entry(), entry()
    table.add_entry(one)
    table.add_entry(two)
    table.mark_sealed(two, now=0.0)
    with pytest.raises(IllegalTransitionError):
        table.mark_sealed(one, now=0.0)
    assert one.state is EntryState.WRITING
    assert table.is_writing(HASH)


PATHS: dict[EntryState, list[str]] = {
    EntryState.WRITING: [],
    EntryState.READY: ["mark_sealed"],
    EntryState.PINNED: ["mark_sealed", "mark_pinned"],
    EntryState.ABANDONED: ["mark_abandoned"],
    EntryState.FREED: ["mark_abandoned", "mark_freed"],
}
STEPS: dict[tuple[EntryState, str], EntryState] = {
    (EntryState.WRITING, "mark_sealed"): EntryState.READY,
    (EntryState.WRITING, "mark_abandoned"): EntryState.ABANDONED,
    (EntryState.READY, "mark_pinned"): EntryState.PINNED,
    (EntryState.READY, "mark_freed"): EntryState.FREED,
    (EntryState.PINNED, "mark_pinned"): EntryState.PINNED,
    (EntryState.PINNED, "mark_unpinned"): EntryState.READY,
    (EntryState.ABANDONED, "mark_freed"): EntryState.FREED,
}


@pytest.mark.parametrize("state", list(EntryState))
@pytest.mark.parametrize(
    "step", ["mark_sealed", "mark_abandoned", "mark_pinned", "mark_unpinned", "mark_freed"]
)
def test_every_step_in_every_state(table: EntryTable, state: EntryState, step: str) -> None:
    one = entry()
    table.add_entry(one)
    for each in PATHS[state]:
        apply(table, one, each)
    assert one.state is state
    if (state, step) in STEPS:
        apply(table, one, step)
        assert one.state is STEPS[state, step]
        return
    before = dict(table.num_bytes)
    with pytest.raises(IllegalTransitionError):
        apply(table, one, step)
    assert (one.state, table.num_bytes) == (state, before)


@pytest.mark.parametrize("state", [each for each in EntryState if each is not EntryState.WRITING])
def test_an_entry_begins_as_a_reservation(table: EntryTable, state: EntryState) -> None:
    one = entry()
    one.state = state
    with pytest.raises(IllegalTransitionError):
        table.add_entry(one)
    assert table.num_reservations == table.num_entries == 0


def apply(table: EntryTable, one: Entry, step: str) -> None:
    if step in ("mark_sealed", "mark_pinned", "mark_unpinned"):
        getattr(table, step)(one, now=1.0)
    else:
        getattr(table, step)(one)
