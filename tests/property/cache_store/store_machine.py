"""The store's logic with clients around it, and what must hold after every step.

`protocol_world` runs the same store among encoders and prefill_decodes that keep to the protocol. Here
clients do not: they name what is not theirs, lose answers, come back, exceed quotas, and write where they
may not.

No two entries overlap, no block is lost, nothing pinned was evicted, bytes add up, the leases and the table
agree. At the end all sessions leave, and every block is free again.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.stores import core_on
from triptych_cache_store.checksums.verifier import Checksums
from triptych_cache_store.core.recovery import trust
from triptych_cache_store.core.state import Outgoing
from triptych_cache_store.entries.entry_table import Entry, EntryState
from triptych_cache_store.entries.leases import SessionId
from triptych_cache_store.entries.space import Limits
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


def live_sessions(machine: "StoreMachine") -> st.SearchStrategy[SessionId]:
    return st.sampled_from(sorted(machine.live) or [SessionId(UNKNOWN_ID)])


def open_reservations(machine: "StoreMachine") -> st.SearchStrategy[ReservationId]:
    return st.sampled_from(sorted(machine.orders) or [ReservationId(UNKNOWN_ID)])


def known_pins(machine: "StoreMachine") -> st.SearchStrategy[int]:
    return st.sampled_from(sorted(machine.held.keys() - machine.unreceived_pins) or [UNKNOWN_ID])


SESSIONS = st.runner().flatmap(live_sessions)
RESERVATIONS = st.runner().flatmap(open_reservations)
PINS = st.runner().flatmap(known_pins)
MOSTLY = st.sampled_from([True, True, True, True, False])


class StoreMachine(StoreWorld):
    """The rules, drawn by hypothesis."""

    @precondition(lambda self: len(self.live) < len(NAMES))
    @rule(data=st.data(), resumes=MOSTLY)
    def connect(self, data: st.DataObject, resumes: bool) -> None:
        self.connect_as(data.draw(st.sampled_from(sorted(set(NAMES) - set(self.live.values())))), resumes)

    @rule(name=st.sampled_from(NAMES))
    def connect_once_more(self, name: str) -> None:
        if name in self.live.values():
            self.connect_as(name, resumes=True)

    @precondition(lambda self: len(self.live) > 2)
    @rule(session=SESSIONS)
    def die(self, session: SessionId) -> None:
        self.leave(session)

    @precondition(lambda self: len(self.live) > 2)
    @rule(session=SESSIONS)
    def lose_connection(self, session: SessionId) -> None:
        """The client lives: it keeps everything but its watches."""
        name = self.live.pop(session, None)
        self.watched = {each for each in self.watched if each[0] != session}
        if name is not None:
            self.detached.add(name)
        assert self.core.disconnect(session, self.now) == []

    @precondition(lambda self: len(self.live) > 2)
    @rule(session=SESSIONS, mm_hash=st.sampled_from(HASHES), reserves=st.booleans())
    def lose_an_answer(self, session: SessionId, mm_hash: MmHash, reserves: bool) -> None:
        """The connection breaks when a command was carried out, but before its answer is read."""
        name = self.live.get(session)
        if name is not None:
            spec = spec_of(mm_hash, self.sizes.setdefault(mm_hash, 2))
            reserve = wire.Reserve(seq=0, mm_hash=mm_hash, spec=spec, may_use_reserve=True)
            command = reserve if reserves else wire.PinOrWatch(seq=0, mm_hash=mm_hash)
            reply = self.send(session, command)
            self.unanswered.setdefault(name, []).append(self.seq)
            if isinstance(reply, wire.Pinned):
                self.held[reply.pin_id] = (name, mm_hash, 1)
                self.unreceived_pins.add(reply.pin_id)
            elif isinstance(reply, wire.Watching):
                self.watched.add((session, mm_hash))
        self.lose_connection(session)

    @precondition(lambda self: self.detached)
    @rule(data=st.data())
    def die_detached(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.detached)))
        self.detached.remove(name)
        self.forget(name)
        self.take_pushes(self.core.reap(self.now))

    @precondition(lambda self: len(self.live) > 2)
    @rule(dead=st.sets(st.sampled_from(NAMES), max_size=2), checks=st.booleans())
    def restart_store(self, dead: set[str], checks: bool) -> None:
        """kill -9 of the store; some clients die while it is away. `checks`: checksums, before it serves."""
        for name in list(self.live.values()):
            self.detached.add(name)
        self.live, self.watched = {}, set()
        for name in dead & self.detached:
            self.detached.remove(name)
            self.forget(name)
        before = self.core.table
        kept = {entry.mm_hash: entry.blocks for entry in before.all_sealed() if self.survives(entry, checks)}
        self.start_store(checks=checks)
        after = {entry.mm_hash: entry.blocks for entry in self.core.table.all_sealed()}
        assert after == kept

    @rule(
        session=SESSIONS,
        mm_hash=st.sampled_from(HASHES),
        num_blocks=st.sampled_from([1, 1, 2, 2, 3, 4, 5, 8, NUM_BLOCKS, NUM_BLOCKS + 2]),
        writer=st.none() | st.sampled_from(NAMES),
        tenant=st.none() | st.sampled_from(["small", "large"]),
        granted=st.booleans(),
    )
    def reserve(
        self,
        session: SessionId,
        mm_hash: MmHash,
        num_blocks: int,
        writer: str | None,
        tenant: str | None,
        granted: bool,
    ) -> None:
        num_blocks = self.sizes.setdefault(mm_hash, num_blocks)
        command = wire.Reserve(
            seq=0,
            mm_hash=mm_hash,
            spec=spec_of(mm_hash, num_blocks),
            writer=writer,
            tenant=tenant,
            may_use_reserve=granted,
        )
        space = self.core.space
        available, held = space.num_available_blocks, space.tenants.num_blocks(tenant or "")
        own = space.tenants.num_evictable_blocks(tenant or "")
        reply = self.send(session, command)
        quota = LIMITS.quota_of(tenant or "")
        assert quota is not None
        if isinstance(reply, wire.Reserved):
            assert available - num_blocks >= (0 if granted else LIMITS.num_reserve_blocks)
            assert space.tenants.num_blocks(tenant or "") <= max(quota, held)
            self.orders[ReservationId(reply.reservation_id)] = (
                writer or self.live[session],
                reply.offset,
                command.spec.num_bytes,
            )
            return
        if isinstance(reply, wire.AlreadySealed):
            assert self.core.table.find_sealed(mm_hash) is not None
            return
        assert isinstance(reply, wire.StoreFailure)
        if reply.code == "full":
            is_kept = available - num_blocks < (0 if granted else LIMITS.num_reserve_blocks)
            is_over = held - own + num_blocks > quota
            is_split = self.core.table.num_bytes[EntryState.READY] == 0  # the free ranges are too short
            assert is_kept or is_over or is_split
        elif reply.code == "too_large":
            assert num_blocks > NUM_BLOCKS

    @rule()
    def relieve(self) -> None:
        """As the server does in the background."""
        if self.core.space.needs_relief:
            while self.core.space.relieve(2):
                pass
            used = NUM_BLOCKS - self.core.space.pool.num_free_blocks
            assert used <= LIMITS.low_watermark or len(self.core.space.policy) == 0

    @rule(session=SESSIONS, mm_hash=st.sampled_from(HASHES), tenant=st.none() | st.just("large"))
    def produce(self, session: SessionId, mm_hash: MmHash, tenant: str | None) -> None:
        """The usual way at once, so that there is something to pin, to evict and to lose."""
        before = set(self.orders)
        self.reserve(session, mm_hash, num_blocks=2, writer=None, tenant=tenant, granted=True)
        for reservation in self.orders.keys() - before:
            self.seal(session, reservation, is_writer=True)

    @precondition(lambda self: self.orders)
    @rule(session=SESSIONS, reservation=RESERVATIONS, is_writer=MOSTLY)
    def seal(self, session: SessionId, reservation: ReservationId, is_writer: bool) -> None:
        session = self.writer_of(reservation, session) if is_writer else session
        entry = self.core.table.find_reservation(reservation)
        mine = entry is not None and self.core.leases.writer_of(reservation).session_id == session
        if mine:
            self.write(reservation)
        reply = self.send(session, wire.Seal(seq=0, reservation_id=reservation))
        assert isinstance(reply, wire.Done) == mine
        if mine:
            assert self.core.table.find_reservation(reservation) is None
            self.written(reservation)

    @precondition(lambda self: self.orders)
    @rule(session=SESSIONS, reservation=RESERVATIONS)
    def cancel(self, session: SessionId, reservation: ReservationId) -> None:
        entry = self.core.table.find_reservation(reservation)
        mine = entry is not None and self.core.leases.writer_of(reservation).session_id == session
        reply = self.send(session, wire.Cancel(seq=0, reservation_id=reservation))
        if isinstance(reply, wire.Done) and entry is not None:
            assert entry.state is (EntryState.FREED if mine else EntryState.ABANDONED)
            if mine:
                self.written(reservation)

    @rule(session=SESSIONS, mm_hash=st.sampled_from(HASHES), num_holders=st.sampled_from([1, 1, 3]))
    def pin_or_watch(self, session: SessionId, mm_hash: MmHash, num_holders: int) -> None:
        command = wire.PinOrWatch(seq=0, mm_hash=mm_hash, num_holders=num_holders)
        reply = self.send(session, command)
        if isinstance(reply, wire.Pinned):
            self.held[reply.pin_id] = (self.live[session], mm_hash, num_holders)
        if isinstance(reply, wire.Watching):
            assert reply.writing == self.core.table.is_writing(mm_hash)
            self.watched.add((session, mm_hash))
            self.holders[session, mm_hash] = num_holders

    @precondition(lambda self: self.held)
    @rule(session=SESSIONS, pin=PINS, is_holder=MOSTLY)
    def unpin(self, session: SessionId, pin: int, is_holder: bool) -> None:
        name = self.held.get(pin, ("",))[0]
        if is_holder:
            session = next((each for each, client in self.live.items() if client == name), session)
        may = pin in self.held and name.split("/")[0] == self.live.get(session, "").split("/")[0]
        reply = self.send(session, wire.Unpin(seq=0, pin_id=pin))
        assert isinstance(reply, wire.Done) == may
        if may:
            holder, mm_hash, num_holders = self.held.pop(pin)
            if num_holders > 1:
                self.held[pin] = (holder, mm_hash, num_holders - 1)

    @rule(session=SESSIONS, is_stranger=st.booleans())
    def ask_for_what_never_was(self, session: SessionId, is_stranger: bool) -> None:
        session = SessionId(UNKNOWN_ID) if is_stranger else session
        for command in (
            wire.Seal(seq=0, reservation_id=UNKNOWN_ID),
            wire.Cancel(seq=0, reservation_id=UNKNOWN_ID),
            wire.Unpin(seq=0, pin_id=UNKNOWN_ID),
        ):
            assert isinstance(self.send(session, command), wire.StoreFailure)

    @precondition(lambda self: self.watched)
    @rule(session=SESSIONS, mm_hash=st.sampled_from(HASHES))
    def unwatch(self, session: SessionId, mm_hash: MmHash) -> None:
        self.send(session, wire.Unwatch(seq=0, mm_hash=mm_hash))
        self.watched.discard((session, mm_hash))

    @rule(session=SESSIONS, mm_hash=st.none() | st.sampled_from(HASHES))
    def evict(self, session: SessionId, mm_hash: MmHash | None) -> None:
        self.send(session, wire.Evict(seq=0, mm_hash=mm_hash))
