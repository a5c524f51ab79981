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


def test_a_whole_life(table: EntryTable) -> None:
    one = entry()
    table.add(one)
    assert table.is_writing(HASH)
    assert table.sealed(HASH) is None
    table.seal(one, now=2.0)
    assert not table.is_writing(HASH)
    assert table.sealed(HASH) is one
    table.pin(one, now=3.0)
    table.pin(one, now=4.0)
    table.unpin(one, now=5.0)
    assert one.state is EntryState.PINNED
    table.unpin(one, now=6.0)
    assert (one.state, one.num_pins, one.last_used_at) == (EntryState.READY, 0, 6.0)
    table.free(one)
    assert table.sealed(HASH) is None
    assert set(table.num_bytes.values()) == {0}


def test_bytes_follow_the_state(table: EntryTable) -> None:
    one, two = entry(), entry()
    table.add(one)
    table.add(two)
    assert table.num_bytes[EntryState.WRITING] == 600
    table.seal(one, now=0.0)
    table.abandon(two)
    assert table.num_bytes[EntryState.WRITING] == 0
    assert table.num_bytes[EntryState.READY] == table.num_bytes[EntryState.ABANDONED] == 300
    table.pin(one, now=0.0)
    assert table.num_bytes[EntryState.PINNED] == 300


def test_only_one_entry_of_a_hash_is_sealed(table: EntryTable) -> None:
    one, two = entry(), entry()
    table.add(one)
    table.add(two)
    table.seal(two, now=0.0)
    with pytest.raises(IllegalTransitionError):
        table.seal(one, now=0.0)
    assert one.state is EntryState.WRITING
    assert table.is_writing(HASH)


PATHS: dict[EntryState, list[str]] = {
    EntryState.WRITING: [],
    EntryState.READY: ["seal"],
    EntryState.PINNED: ["seal", "pin"],
    EntryState.ABANDONED: ["abandon"],
    EntryState.FREED: ["abandon", "free"],
}
STEPS: dict[tuple[EntryState, str], EntryState] = {
    (EntryState.WRITING, "seal"): EntryState.READY,
    (EntryState.WRITING, "abandon"): EntryState.ABANDONED,
    (EntryState.READY, "pin"): EntryState.PINNED,
    (EntryState.READY, "free"): EntryState.FREED,
    (EntryState.PINNED, "pin"): EntryState.PINNED,
    (EntryState.PINNED, "unpin"): EntryState.READY,
    (EntryState.ABANDONED, "free"): EntryState.FREED,
}


@pytest.mark.parametrize("state", list(EntryState))
@pytest.mark.parametrize("step", ["seal", "abandon", "pin", "unpin", "free"])
def test_every_step_in_every_state(table: EntryTable, state: EntryState, step: str) -> None:
    one = entry()
    table.add(one)
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


def apply(table: EntryTable, one: Entry, step: str) -> None:
    if step in ("seal", "pin", "unpin"):
        getattr(table, step)(one, now=1.0)
    else:
        getattr(table, step)(one)
