"""The whole store logic (table, pool, policy, leases, core) against a model, step by random step."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.support.store.store_world import HASHES, LIMITS, NAMES, NUM_BLOCKS, UNKNOWN_ID, StoreWorld, spec_of
from triptych_cache_store.entries.entry_table import EntryState
from triptych_cache_store.entries.leases import SessionId
from triptych_common.protocol import store as wire
from triptych_common.protocol.ids import MmHash, ReservationId


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
    """The rules."""

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
