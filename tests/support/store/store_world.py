"""The store's logic with clients around it, and what must hold after every step (`store_machine` takes them).

No two entries overlap, no block is lost, nothing pinned was evicted, bytes add up, the leases and the table
agree. At the end all sessions leave, and every block is free again.
"""

from hypothesis.stateful import RuleBasedStateMachine, invariant

from triptych_cache_store.checksums.checksums import Checksums
from triptych_cache_store.core.recovery import trust
from triptych_cache_store.core.state import Outgoing
from triptych_cache_store.entries.entry_table import Entry, EntryState
from triptych_cache_store.entries.leases import SessionId
from triptych_cache_store.entries.limits import Limits
from triptych_cache_store.testing import core_on
from triptych_common.protocol import store as wire
from triptych_common.protocol.ids import MmHash, ReservationId
from triptych_common.region.layout import RegionLayout

NUM_BLOCKS = 24
BLOCK = 4096
LIMITS = Limits(
    num_reserve_blocks=3,
    high_watermark=20,
    low_watermark=12,
    tenant_quotas={"small": 5},
    default_tenant_quota=18,
)
HASHES = [MmHash(f"{n:064x}") for n in range(6)]
NAMES = ["encoder-0/host", "encoder-0/worker-0", "encoder-1/worker-0", "pd-0/engine", "pd-0/worker-0"]
UNKNOWN_ID = 10**9
"""A session, reservation or pin that there never was."""


def spec_of(mm_hash: str, num_blocks: int) -> wire.TensorSpec:
    return wire.TensorSpec(shape=(num_blocks, BLOCK // 2), dtype="float16", num_bytes=num_blocks * BLOCK)


class StoreWorld(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.layout = RegionLayout(BLOCK, NUM_BLOCKS, num_pin_records=24, num_client_slots=8)
        self.region = bytearray(self.layout.num_bytes)
        self.now = 0.0
        self.generation = 0
        self.next_session = 1
        self.alive: set[int] = set()  # slots whose client holds its lock
        self.live: dict[SessionId, str] = {}
        self.leases: dict[str, tuple[int, int]] = {}  # client -> lease id and slot
        self.detached: set[str] = set()  # clients that lost their connection and live
        self.held: dict[int, tuple[str, str, int]] = {}  # pin -> (client, mm_hash, holders left)
        self.watched: set[tuple[SessionId, str]] = set()
        self.holders: dict[tuple[SessionId, str], int] = {}  # of the watches, at least
        self.sizes: dict[str, int] = {}
        self.seq = 0
        self.last_seqs: dict[str, int] = {}  # client -> of the last command that the store took from it
        self.unanswered: dict[str, list[int]] = {}  # client -> commands whose answer never arrived
        self.unreceived_pins: set[int] = set()
        self.orders: dict[ReservationId, tuple[str, int, int]] = {}  # reservation -> (writer, offset, bytes)
        self.start_store()
        for name in NAMES:
            self.connect_as(name, resumes=False)

    def start_store(self, *, checks: bool = False) -> None:
        self.generation += 1
        is_alive = self.alive.__contains__
        self.core = core_on(
            self.region,
            self.layout,
            generation=self.generation,
            limits=LIMITS,
            is_alive=is_alive,
            now=self.now,
            is_intact=Checksums(memoryview(self.region), self.layout).has_checksum if checks else trust,
        )

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def handle(self, session: SessionId, command: wire.StoreCommand) -> list[Outgoing]:
        """Carry it out; `seq` of `command` is set here."""
        self.now += 1.0
        command = command.model_copy(update={"seq": self.next_seq()})
        outgoing = self.core.handle(session, command, self.now)
        if session in self.live and not isinstance(command, wire.Hello):
            self.last_seqs[self.live[session]] = command.seq
        assert all(each.reply.seq in (0, command.seq) for each in outgoing)
        return outgoing

    def send(self, session: SessionId, command: wire.StoreCommand) -> wire.StoreReply:
        outgoing = self.handle(session, command)
        assert outgoing[0].session_id == session
        assert outgoing[0].reply.seq == self.seq
        self.take_pushes(outgoing[1:])
        return outgoing[0].reply

    def take_pushes(self, outgoing: list[Outgoing]) -> None:
        for session, push, _ in outgoing:
            assert push.seq == 0
            if isinstance(push, wire.EntrySealed):
                mm_hash = push.descriptor.mm_hash
                assert (session, mm_hash) in self.watched
                self.watched.remove((session, mm_hash))
                self.held[push.pin_id] = (self.live[session], mm_hash, self.holders[session, mm_hash])
            else:
                assert isinstance(push, wire.WriterLost)
                assert (session, push.mm_hash) in self.watched
                assert not self.core.table.is_writing(MmHash(push.mm_hash))

    # ---- for machines that check more ---------------------------------------------------------------
    def write(self, reservation: ReservationId) -> None:
        """The writer writes the whole of its reservation."""

    def written(self, reservation: ReservationId) -> None:
        """The writer has sealed or cancelled, and writes no more."""
        del self.orders[reservation]

    def survives(self, entry: Entry, checks: bool) -> bool:
        """Whether a sealed entry lives through a restart."""
        return True

    # ---- clients -----------------------------------------------------------------------------------
    def connect_as(self, name: str, resumes: bool) -> None:
        session = SessionId(self.next_session)
        self.next_session += 1
        lease = self.leases.get(name)
        undo = tuple(self.unanswered.get(name, ()))
        resume = None
        if resumes and lease:
            resume = wire.Resume(region_id="region", lease_id=lease[0], undo_seqs=undo)
        reply = self.send(session, wire.Hello(seq=1, version=1, client=name, resume=resume))
        is_back = name in self.detached and resume is not None
        if name in self.live.values() or (name in self.detached and not is_back):
            assert isinstance(reply, wire.StoreFailure)
            return
        assert isinstance(reply, wire.Welcome)
        assert (lease == (reply.lease_id, reply.client_slot)) == is_back
        if is_back:
            self.resumed(name, reply, undo)
        self.live[session] = name
        self.leases[name] = (reply.lease_id, reply.client_slot)
        self.detached.discard(name)
        self.alive.add(reply.client_slot)

    def resumed(self, name: str, welcome: wire.Welcome, undo: tuple[int, ...]) -> None:
        """A command whose reply never arrived is as if it had not been sent; the rest is as it was."""
        assert welcome.last_seq == self.last_seqs.get(name, 0)
        lease = self.core.leases.find_by_client(name)
        assert lease is not None
        of_lease = [e for e in self.core.table.all_unsealed() if e.requester_lease == lease.lease_id]
        assert not [each for each in of_lease if each.origin_seq in undo]
        for pin in [pin for pin in self.unreceived_pins if self.held.get(pin, ("",))[0] == name]:
            self.unreceived_pins.remove(pin)
            del self.held[pin]
        self.unanswered.pop(name, None)

    def leave(self, session: SessionId) -> None:
        self.watched = {each for each in self.watched if each[0] != session}
        name = self.live.pop(session, None)
        if name is not None:
            self.forget(name)
        self.take_pushes(self.core.disconnect(session, self.now))

    def forget(self, name: str) -> None:
        self.alive.discard(self.leases.pop(name)[1])
        self.last_seqs.pop(name, None)
        self.unanswered.pop(name, None)
        self.held = {pin: held for pin, held in self.held.items() if held[0] != name}
        self.orders = {each: order for each, order in self.orders.items() if order[0] != name}

    def writer_of(self, reservation: ReservationId, otherwise: SessionId) -> SessionId:
        """The session of the reservation's writer, if it has one."""
        name = self.orders.get(reservation, ("",))[0]
        return next((session for session, each in self.live.items() if each == name), otherwise)

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
            entry = self.core.table.find_sealed(MmHash(mm_hash))
            assert entry is not None
            assert entry.state is EntryState.PINNED
            assert entry.num_pins == num_pins
        for entry in self.core.table.all_sealed():
            assert (entry.state is EntryState.PINNED) == (entry.mm_hash in pins_of)

    @invariant()
    def what_may_go_is_known(self) -> None:
        space = self.core.space
        ready = [entry for entry in self.core.table.all_sealed() if entry.state is EntryState.READY]
        num_blocks = sum(entry.blocks.num_blocks for entry in ready)
        assert len(space.policy) == len(ready)
        assert space.num_evictable_blocks == num_blocks
        assert space.evictable.by_start == {entry.blocks.start: entry for entry in ready}
        assert space.evictable.by_end == {entry.blocks.end: entry for entry in ready}
        assert sum(space.tenants.num_evictable_blocks(each) for each in ("", "small", "large")) == num_blocks
        used = NUM_BLOCKS - space.pool.num_free_blocks
        assert sum(space.tenants.num_blocks(each) for each in ("", "small", "large")) == used

    def teardown(self) -> None:
        for session in list(self.live):
            self.leave(session)
        self.alive.clear()
        self.core.reap(self.now)
        assert self.core.table.num_reservations == 0
        assert self.core.leases.num_pins == self.core.leases.num_watches == 0
        self.core.space.evict_all()
        assert self.core.space.pool.num_free_blocks == NUM_BLOCKS
        assert self.core.space.pool.largest_free_range() == NUM_BLOCKS
