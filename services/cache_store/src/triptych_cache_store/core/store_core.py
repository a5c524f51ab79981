"""Core of the store: takes commands, returns replies and pushes. No I/O, no clock, never awaits.

Commands are handled one at a time, so each is atomic: nothing can be sealed between the lookup and the
watch of `PinOrWatch`. `now` is in monotonic seconds everywhere.
"""

from collections.abc import Callable

from triptych_cache_store.core.commands import Commands
from triptych_cache_store.core.state import Out, Outgoing, Refusal, StoreState
from triptych_cache_store.entries.entry_table import EntryTable
from triptych_cache_store.entries.leases import Lease, LeaseTable, SessionId
from triptych_cache_store.entries.space import Space
from triptych_cache_store.persistence.journal import short_namespace
from triptych_common.protocol.store import (
    STORE_PROTOCOL_VERSION,
    Hello,
    StoreCommand,
    StoreFailure,
    StoreReply,
    Welcome,
)


class Sessions:
    """Attaches connections to leases.

    `is_connected`: whether a session's peer still holds its end of the connection, `is_alive`: whether
    the client in a slot still holds its kernel lock.
    """

    def __init__(
        self, state: StoreState, *, is_connected: Callable[[SessionId], bool], is_alive: Callable[[int], bool]
    ) -> None:
        self._state = state
        self._is_connected = is_connected
        self._is_alive = is_alive

    def hello(self, session_id: SessionId, command: Hello, now: float, out: Out) -> Welcome:
        """Lease for the session: the one that it resumes if that still exists, else a new one.

        Raises:
            Refusal: another version, a second hello, a name that a living client has, or no free slot.
        """
        if command.version != STORE_PROTOCOL_VERSION:
            detail = f"this store speaks version {STORE_PROTOCOL_VERSION}, not {command.version}"
            raise Refusal("bad_version", detail, closes=True)
        if self._state.leases.find_by_session(session_id) is not None:
            raise Refusal("bad_frame", "hello was said before", closes=True)
        holder = self._state.leases.find_by_client(command.client)
        if holder is not None and holder.session_id is not None:
            if self._is_connected(holder.session_id):
                raise Refusal("not_owner", f"{command.client} has a live session", closes=True)
            self.disconnect(holder.session_id, now, out)
            holder = self._state.leases.find_by_client(command.client)
        if holder is not None and self._resumes(holder, command):
            self._resume(holder, session_id, command, now, out)
            return self._welcome(command, holder)
        if holder is not None:
            if self._is_alive(holder.slot):
                raise Refusal("not_owner", f"{command.client} is alive and may come back", closes=True)
            self._state.end_lease(holder, now, out)
        return self._welcome(command, self._open(session_id, command, now))

    def disconnect(self, session_id: SessionId, now: float, out: Out) -> None:
        """Detach the lease of a connection that is gone if its client lives; else end it."""
        lease = self._state.leases.find_by_session(session_id)
        if lease is None:
            return
        if self._is_alive(lease.slot):
            self._state.end_watches(lease)
            self._state.leases.detach_lease(lease)
        else:
            self._state.end_lease(lease, now, out)

    def reap(self, now: float, out: Out) -> None:
        """End the leases of detached clients that died."""
        for lease in self._state.leases.detached_leases():
            if not self._is_alive(lease.slot):
                self._state.end_lease(lease, now, out)

    def _open(self, session_id: SessionId, command: Hello, now: float) -> Lease:
        lease_id, namespace = next(self._state.ids), short_namespace(command.namespace_digest)
        slot = self._state.journal.try_open_slot(lease_id, command.client, namespace)
        if slot is None:
            raise Refusal("full", "the store has no free client slot", closes=True)
        lease = Lease(lease_id, slot, session_id, command.client, namespace, opened_at=now)
        self._state.leases.add_lease(lease)
        return lease

    def _resumes(self, holder: Lease, command: Hello) -> bool:
        resume = command.resume
        return (
            resume is not None
            and resume.region_id == self._state.identity.region_id
            and resume.lease_id == holder.lease_id
        )

    def _resume(self, lease: Lease, session_id: SessionId, command: Hello, now: float, out: Out) -> None:
        """Undo commands whose reply the client did not get; it sends them again."""
        undo = set(command.resume.undo_seqs if command.resume is not None else ())
        state = self._state
        for pin in [pin for pin in lease.pins.values() if pin.origin_seq in undo]:
            state.end_pin(pin, now)
        for entry in list(state.table.all_unsealed()):
            if entry.requester_lease == lease.lease_id and entry.origin_seq in undo:
                state.release_reservation(entry, out)  # its writer was not told, so it is not written
        state.leases.attach_lease(lease, session_id)

    def _welcome(self, command: Hello, lease: Lease) -> Welcome:
        identity = self._state.identity
        return Welcome(
            seq=command.seq,
            store=identity.store,
            generation=identity.generation,
            region_path=identity.region_path,
            region_num_bytes=identity.layout.num_bytes,
            block_num_bytes=identity.layout.block_num_bytes,
            region_id=identity.region_id,
            lease_id=lease.lease_id,
            client_slot=lease.slot,
            last_seq=lease.last_seq,
            slab=None if self._state.slab is None else self._state.slab.info,
        )


class StoreCore:
    """Entry points to the state: commands, ends of connections, checks for dead clients."""

    def __init__(
        self, state: StoreState, *, is_connected: Callable[[SessionId], bool], is_alive: Callable[[int], bool]
    ) -> None:
        self.state = state
        self._commands = Commands(state)
        self._sessions = Sessions(state, is_connected=is_connected, is_alive=is_alive)

    def handle(self, session_id: SessionId, command: StoreCommand, now: float) -> Out:
        """Execute `command`; its reply is first in the result, or comes later (`Verify`)."""
        out: Out = []
        for space in self.state.spaces:
            space.free_held(now)
        try:
            reply = self._reply_to(session_id, command, now, out)
        except Refusal as refusal:
            self.state.counters.num_refused[command.kind, refusal.code] += 1
            failure = StoreFailure(seq=command.seq, code=refusal.code, detail=refusal.detail)
            out.insert(0, Outgoing(session_id, failure, refusal.closes))
        else:
            if reply is not None:
                out.insert(0, Outgoing(session_id, reply))
        return out

    def disconnect(self, session_id: SessionId, now: float) -> Out:
        """Handle the end of a connection; its leases end unless the client lives."""
        out: Out = []
        self._sessions.disconnect(session_id, now, out)
        return out

    def reap(self, now: float) -> Out:
        """End the leases of clients that died after losing their connection."""
        out: Out = []
        self._sessions.reap(now, out)
        return out

    @property
    def num_detached(self) -> int:
        """Number of living clients without a connection; while there are any, `reap` must be called."""
        return self.leases.num_detached

    @property
    def leases(self) -> LeaseTable:
        return self.state.leases

    @property
    def space(self) -> Space:
        return self.state.space

    @property
    def table(self) -> EntryTable:
        return self.state.table

    def _reply_to(
        self, session_id: SessionId, command: StoreCommand, now: float, out: Out
    ) -> StoreReply | None:
        if isinstance(command, Hello):
            return self._sessions.hello(session_id, command, now, out)
        lease = self.leases.find_by_session(session_id)
        if lease is None:
            raise Refusal("not_hello", "the first frame of a session must be hello", closes=True)
        lease.last_seq = command.seq
        self.state.journal.note_seq(lease.slot, command.seq)
        return self._commands.handlers[type(command)](lease, command, now, out)
