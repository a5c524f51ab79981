"""The whole store logic (table, pool, policy, leases, core) against a model, step by random step.

After every step: no two entries overlap, no block is lost, nothing pinned was evicted, bytes add up,
the leases and the table agree. At the end all sessions leave, and every block is free again.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from triptych_cache_store.block_pool import BestFitPool
from triptych_cache_store.core import Outgoing, StoreCore, StoreIdentity
from triptych_cache_store.entry_table import EntryState, EntryTable
from triptych_cache_store.eviction import RecencyPolicy
from triptych_cache_store.leases import SessionId
from triptych_cache_store.space import Space
from triptych_common.protocol import store as wire
from triptych_common.region.layout import RegionLayout

NUM_BLOCKS = 24
BLOCK = 4096
HASHES = [f"{n:064x}" for n in range(6)]
NAMES = ["encoder-0/host", "encoder-0/worker-0", "encoder-1/worker-0", "pd-0/engine", "pd-0/worker-0"]


def spec_of(mm_hash: str, num_blocks: int) -> wire.TensorSpec:
    return wire.TensorSpec(shape=(num_blocks, BLOCK // 2), dtype="float16", num_bytes=num_blocks * BLOCK)


class StoreMachine(RuleBasedStateMachine):
    sessions = Bundle("sessions")
    reservations = Bundle("reservations")
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        layout = RegionLayout(BLOCK, NUM_BLOCKS, num_pin_records=64, num_client_slots=16)
        space = Space(EntryTable(BLOCK), BestFitPool(NUM_BLOCKS), RecencyPolicy())
        self.core = StoreCore(
            StoreIdentity("store-0", "/nowhere", 1, layout), space, is_connected=lambda _: True
        )
        self.now = 0.0
        self.next_session = 1
        self.live: dict[SessionId, str] = {}
        self.held: dict[int, tuple[SessionId, str, int]] = {}  # pin -> (session, mm_hash, holders left)
        self.watched: set[tuple[SessionId, str]] = set()
        self.sizes: dict[str, int] = {}

    def send(self, session: SessionId, command: wire.StoreCommand) -> wire.StoreReply:
        self.now += 1.0
        outgoing = self.core.handle(session, command, self.now)
        assert outgoing[0].session_id == session
        assert outgoing[0].reply.seq == command.seq
        self.take_pushes(outgoing[1:])
        return outgoing[0].reply

    def take_pushes(self, outgoing: list[Outgoing]) -> None:
        for session, push, _ in outgoing:
            assert push.seq == 0
            if isinstance(push, wire.EntrySealed):
                mm_hash = push.descriptor.mm_hash
                assert (session, mm_hash) in self.watched
                self.watched.remove((session, mm_hash))
                self.held[push.pin_id] = (session, mm_hash, 1)
            else:
                assert isinstance(push, wire.WriterLost)
                assert (session, push.mm_hash) in self.watched
                assert not self.core.table.is_writing(push.mm_hash)

    # ---- rules -----------------------------------------------------------------------------------
    @rule(target=sessions, name=st.sampled_from(NAMES))
    def connect(self, name: str) -> SessionId:
        session = SessionId(self.next_session)
        self.next_session += 1
        reply = self.send(session, wire.Hello(seq=1, version=1, client=name))
        if name in self.live.values():
            assert isinstance(reply, wire.StoreFailure)
        else:
            assert isinstance(reply, wire.Welcome)
            self.live[session] = name
        return session

    @rule(session=consumes(sessions))
    def disconnect(self, session: SessionId) -> None:
        self.leave(session)

    def leave(self, session: SessionId) -> None:
        self.watched = {each for each in self.watched if each[0] != session}
        self.held = {pin: held for pin, held in self.held.items() if held[0] != session}
        self.live.pop(session, None)
        self.take_pushes(self.core.disconnect(session, self.now))

    @rule(
        target=reservations,
        session=sessions,
        mm_hash=st.sampled_from(HASHES),
        num_blocks=st.integers(1, NUM_BLOCKS + 2),
        writer=st.none() | st.sampled_from(NAMES),
    )
    def reserve(self, session: SessionId, mm_hash: str, num_blocks: int, writer: str | None) -> int:
        num_blocks = self.sizes.setdefault(mm_hash, num_blocks)
        command = wire.Reserve(seq=2, mm_hash=mm_hash, spec=spec_of(mm_hash, num_blocks), writer=writer)
        reply = self.send(session, command)
        if isinstance(reply, wire.Reserved):
            return reply.reservation_id
        if isinstance(reply, wire.AlreadySealed):
            assert self.core.table.sealed(mm_hash) is not None
        elif reply.code == "full":  # all that is left is in use, or the free ranges are too short
            assert self.core.table.num_bytes[EntryState.READY] == 0
        elif reply.code == "too_large":
            assert num_blocks > NUM_BLOCKS
        return 10**9

    @rule(session=sessions, reservation=reservations)
    def seal(self, session: SessionId, reservation: int) -> None:
        entry = self.core.table.reservation(reservation)
        mine = entry is not None and self.core.leases.writer_of(reservation).session_id == session
        reply = self.send(session, wire.Seal(seq=3, reservation_id=reservation))
        assert isinstance(reply, wire.Done) == mine
        if mine:
            assert self.core.table.reservation(reservation) is None

    @rule(session=sessions, reservation=reservations)
    def cancel(self, session: SessionId, reservation: int) -> None:
        entry = self.core.table.reservation(reservation)
        mine = entry is not None and self.core.leases.writer_of(reservation).session_id == session
        reply = self.send(session, wire.Cancel(seq=4, reservation_id=reservation))
        if isinstance(reply, wire.Done) and entry is not None:
            assert entry.state is (EntryState.FREED if mine else EntryState.ABANDONED)

    @rule(target=pins, session=sessions, mm_hash=st.sampled_from(HASHES), num_holders=st.integers(1, 3))
    def pin_or_watch(self, session: SessionId, mm_hash: str, num_holders: int) -> int:
        command = wire.PinOrWatch(seq=5, mm_hash=mm_hash, num_holders=num_holders)
        reply = self.send(session, command)
        if isinstance(reply, wire.Pinned):
            self.held[reply.pin_id] = (session, mm_hash, num_holders)
            return reply.pin_id
        if isinstance(reply, wire.Watching):
            assert reply.writing == self.core.table.is_writing(mm_hash)
            self.watched.add((session, mm_hash))
        return 10**9

    @rule(session=sessions, pin=pins)
    def unpin(self, session: SessionId, pin: int) -> None:
        reply = self.send(session, wire.Unpin(seq=6, pin_id=pin))
        if isinstance(reply, wire.Done):
            holder, mm_hash, num_holders = self.held.pop(pin)
            assert self.live[holder].split("/")[0] == self.live[session].split("/")[0]
            if num_holders > 1:
                self.held[pin] = (holder, mm_hash, num_holders - 1)

    @rule(session=sessions, data=st.data())
    def unpin_pushed(self, session: SessionId, data: st.DataObject) -> None:
        if self.held:
            self.unpin(session, data.draw(st.sampled_from(sorted(self.held))))

    @rule(session=sessions, mm_hash=st.sampled_from(HASHES))
    def unwatch(self, session: SessionId, mm_hash: str) -> None:
        self.send(session, wire.Unwatch(seq=7, mm_hash=mm_hash))
        self.watched.discard((session, mm_hash))

    @rule(session=sessions, mm_hash=st.none() | st.sampled_from(HASHES))
    def evict(self, session: SessionId, mm_hash: str | None) -> None:
        self.send(session, wire.Evict(seq=8, mm_hash=mm_hash))

    # ---- invariants ------------------------------------------------------------------------------
    @invariant()
    def ranges_do_not_overlap_and_none_is_lost(self) -> None:
        table, pool = self.core.table, self.core.space.pool
        ranges = [entry.blocks for entry in (*table.all_sealed(), *table.all_unsealed())]
        used = [block for each in ranges for block in range(each.start, each.end)]
        assert len(used) == len(set(used))
        assert all(0 <= block < NUM_BLOCKS for block in used)
        assert len(used) + pool.num_free_blocks == NUM_BLOCKS

    @invariant()
    def bytes_add_up(self) -> None:
        stats = self.core.handle(SessionId(0), wire.Hello(seq=1, version=1, client="probe"), self.now)
        reply = self.core.handle(SessionId(0), wire.StatsQuery(seq=2), self.now)[0].reply
        self.core.disconnect(SessionId(0), self.now)
        assert isinstance(stats[0].reply, wire.Welcome)
        assert isinstance(reply, wire.StoreStats)
        parts = (
            reply.free_num_bytes,
            reply.writing_num_bytes,
            reply.ready_num_bytes,
            reply.pinned_num_bytes,
            reply.abandoned_num_bytes,
        )
        assert sum(parts) == reply.region_num_bytes == NUM_BLOCKS * BLOCK
        assert reply.num_pins == len(self.held)
        assert reply.num_watches == len(self.watched)
        assert reply.num_sessions == len(self.live) + 1

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        pins_of: dict[str, int] = {}
        for _, mm_hash, _ in self.held.values():
            pins_of[mm_hash] = pins_of.get(mm_hash, 0) + 1
        for mm_hash, num_pins in pins_of.items():
            entry = self.core.table.sealed(mm_hash)
            assert entry is not None
            assert entry.state is EntryState.PINNED
            assert entry.num_pins == num_pins
        for entry in self.core.table.all_sealed():
            assert (entry.state is EntryState.PINNED) == (entry.mm_hash in pins_of)

    @invariant()
    def the_policy_knows_what_may_go(self) -> None:
        ready = sum(entry.state is EntryState.READY for entry in self.core.table.all_sealed())
        assert len(self.core.space.policy) == ready

    def teardown(self) -> None:
        for session in list(self.live):
            self.leave(session)
        assert self.core.table.num_reservations == 0
        assert self.core.leases.num_pins == self.core.leases.num_watches == 0
        self.core.space.evict_all()
        assert self.core.space.pool.num_free_blocks == NUM_BLOCKS
        assert self.core.space.pool.largest_free_range() == NUM_BLOCKS


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=80, deadline=None)
