"""Entries in the region, in Redis and on a GPU side by side: each memory's blocks add up after every step.

What concerns all entries alike is in `test_store_core.py`.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.examples import examples
from tests.support.stores import core_on
from triptych_cache_store.entries.entry_table import EntryState
from triptych_cache_store.entries.leases import SessionId
from triptych_common.protocol import store as wire
from triptych_common.region.layout import RegionLayout

BLOCK, NUM_BLOCKS, NUM_SLAB_BLOCKS = 4096, 12, 7
SLAB = wire.SlabInfo(
    memory="cuda:GPU-00000000-0000-0000-0000-00000000000a",
    num_bytes=NUM_SLAB_BLOCKS * BLOCK + 100,
    ipc_handle="0" * 128,
)
MEMORIES = [wire.SHM, wire.REDIS, SLAB.memory]
HASHES = [f"{n:064x}" for n in range(8)]
ME, WRITER = SessionId(1), SessionId(2)
HELD_S = 2.0


class MemoriesMachine(RuleBasedStateMachine):
    """One client that holds its lock, so that a restart of the store finds it detached, and one writer that
    dies with what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layout = RegionLayout(BLOCK, NUM_BLOCKS, num_pin_records=8, num_client_slots=4)
        self.region = bytearray(self.layout.data_offset)
        self.sizes: dict[str, int] = {}
        self.generation = 0
        self.now = 0.0
        self.lease: wire.Welcome | None = None
        self.reservations: list[int] = []
        self.pins: dict[int, str] = {}
        self.writer_slot: int | None = None  # while it lives
        self.dead_slots: set[int] = set()
        self.written: set[int] = set()  # reservations of the writer
        self.died_at: dict[int, float] = {}  # by block of the slab
        self.start_store()

    def start_store(self) -> None:
        self.generation += 1
        self.core = core_on(
            self.region,
            self.layout,
            generation=self.generation,
            is_alive=lambda slot: slot not in self.dead_slots,
            slab=SLAB,
        )
        resume = self.lease and wire.Resume(region_id="region", lease_id=self.lease.lease_id)
        reply = self.send(wire.Hello(seq=1, version=1, client="pd-0/engine", resume=resume))
        assert isinstance(reply, wire.Welcome)
        assert self.lease is None or self.lease.lease_id == reply.lease_id
        self.lease = reply

    def send(self, command: wire.StoreCommand) -> wire.StoreReply:
        self.now += 1.0
        return self.core.handle(ME, command, self.now)[0].reply

    @rule(mm_hash=st.sampled_from(HASHES), memory=st.sampled_from(MEMORIES), num_blocks=st.integers(1, 5))
    def reserve_mine(self, mm_hash: str, memory: str, num_blocks: int) -> None:
        self.reserve(mm_hash, memory, num_blocks)

    def reserve(self, mm_hash: str, memory: str, num_blocks: int, writer: str | None = None) -> None:
        num_blocks = self.sizes.setdefault(mm_hash, num_blocks)
        spec = wire.TensorSpec(shape=(num_blocks, BLOCK // 2), dtype="float16", num_bytes=num_blocks * BLOCK)
        reply = self.send(wire.Reserve(seq=2, mm_hash=mm_hash, spec=spec, memory=memory, writer=writer))
        if isinstance(reply, wire.Reserved):
            assert reply.memory == memory
            last = reply.offset + spec.num_bytes
            assert last <= (SLAB.num_bytes if memory == SLAB.memory else self.layout.num_bytes)
            self.reservations.append(reply.reservation_id)
            if memory == SLAB.memory:
                blocks = range(reply.offset // BLOCK, reply.offset // BLOCK + num_blocks)
                since = [self.now - self.died_at.get(block, -HELD_S) for block in blocks]
                assert min(since) >= HELD_S, "a dead writer's copy may still land there"

    @rule(mm_hash=st.sampled_from(HASHES), memory=st.sampled_from(MEMORIES), num_blocks=st.integers(1, 5))
    def write(self, mm_hash: str, memory: str, num_blocks: int) -> None:
        """The writer gets blocks, and will not come to seal them."""
        if self.writer_slot is None:
            hello = wire.Hello(seq=1, version=1, client="encoder-0/worker-0")
            welcome = self.core.handle(WRITER, hello, self.now)[0].reply
            assert isinstance(welcome, wire.Welcome)
            self.writer_slot = welcome.client_slot
            self.dead_slots.discard(self.writer_slot)
        before = len(self.reservations)
        self.reserve(mm_hash, memory, num_blocks, writer="encoder-0/worker-0")
        self.written |= {self.reservations.pop() for _ in self.reservations[before:]}

    @rule()
    def kill_writer(self) -> None:
        if self.writer_slot is None:
            return
        self.dead_slots.add(self.writer_slot)
        self.writer_slot = None
        for entry in self.core.table.all_unsealed():
            if entry.reservation_id in self.written and entry.memory == SLAB.memory:
                self.died_at |= dict.fromkeys(range(entry.blocks.start, entry.blocks.end), self.now)
        self.core.disconnect(WRITER, self.now)
        left = {entry.reservation_id for entry in self.core.table.all_unsealed()}
        assert not left & self.written
        self.written.clear()

    @rule(data=st.data(), seals=st.booleans())
    def end_reservation(self, data: st.DataObject, seals: bool) -> None:
        if self.reservations:
            index = data.draw(st.integers(0, len(self.reservations) - 1))
            reservation_id = self.reservations.pop(index)
            make = wire.Seal if seals else wire.Cancel
            assert isinstance(self.send(make(seq=3, reservation_id=reservation_id)), wire.Done)

    @rule(mm_hash=st.sampled_from(HASHES))
    def pin(self, mm_hash: str) -> None:
        reply = self.send(wire.PinOrWatch(seq=4, mm_hash=mm_hash))
        if isinstance(reply, wire.Pinned):
            entry = self.core.table.find_sealed(mm_hash)
            assert entry is not None
            assert reply.descriptor.memory == entry.memory
            self.pins[reply.pin_id] = mm_hash
        self.send(wire.Unwatch(seq=5, mm_hash=mm_hash))

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pins:
            pin_id = data.draw(st.sampled_from(sorted(self.pins)))
            del self.pins[pin_id]
            assert isinstance(self.send(wire.Unpin(seq=6, pin_id=pin_id)), wire.Done)

    @rule(mm_hash=st.none() | st.sampled_from(HASHES))
    def evict(self, mm_hash: str | None) -> None:
        self.send(wire.Evict(seq=7, mm_hash=mm_hash))

    @rule()
    def restart_store(self) -> None:
        """What was on the GPU is gone, with its pins and reservations; the rest is as it was."""
        self.kill_writer()
        self.died_at.clear()  # the new store's slab is another
        kept = {
            entry.mm_hash: (entry.memory, entry.blocks, entry.num_pins)
            for entry in self.core.table.all_sealed()
            if entry.memory != SLAB.memory
        }
        unsealed = {
            entry.reservation_id for entry in self.core.table.all_unsealed() if entry.memory != SLAB.memory
        }
        self.start_store()
        after = {
            entry.mm_hash: (entry.memory, entry.blocks, entry.num_pins)
            for entry in self.core.table.all_sealed()
        }
        assert after == kept
        assert {entry.reservation_id for entry in self.core.table.all_unsealed()} == unsealed
        self.reservations = [each for each in self.reservations if each in unsealed]
        self.pins = {pin_id: mm_hash for pin_id, mm_hash in self.pins.items() if mm_hash in kept}

    @invariant()
    def blocks_of_each_memory_add_up(self) -> None:
        state, table = self.core.state, self.core.table
        assert state.slab is not None
        entries = [*table.all_sealed(), *table.all_unsealed()]
        for space, num_blocks in ((state.space, NUM_BLOCKS), (state.slab.space, NUM_SLAB_BLOCKS)):
            mine = [entry for entry in entries if state.space_of(entry) is space]
            ranges = [*(entry.blocks for entry in mine), *(blocks for _, blocks in space.held)]
            used = [block for blocks in ranges for block in range(blocks.start, blocks.end)]
            assert len(used) == len(set(used))
            assert len(used) + space.pool.num_free_blocks == num_blocks == space.pool.num_blocks
            ready = [entry for entry in mine if entry.state is EntryState.READY]
            assert space.num_evictable_blocks == sum(entry.blocks.num_blocks for entry in ready)
        free = state.space.pool.num_free_blocks * BLOCK
        assert free + sum(table.num_bytes.values()) == NUM_BLOCKS * BLOCK

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        assert self.core.leases.num_pins == len(self.pins)
        for mm_hash in self.pins.values():
            entry = self.core.table.find_sealed(mm_hash)
            assert entry is not None
            assert entry.state is EntryState.PINNED


TestMemoriesMachine = MemoriesMachine.TestCase
TestMemoriesMachine.settings = settings(max_examples=examples(60), stateful_step_count=60)
