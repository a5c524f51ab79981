"""Sessions: hello, resume, disconnect, and the end of clients that do not come back. Pure."""

from collections.abc import Callable

from triptych_cache_store.core.state import Out, Refusal, StoreState
from triptych_cache_store.entries.leases import Lease, SessionId
from triptych_cache_store.persistence.journal import short_namespace
from triptych_common.protocol.store import STORE_PROTOCOL_VERSION, Hello, Welcome


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

    def reap(self, now: float, out: Out) -> int:
        """End the leases of detached clients that died; returns the number of those left."""
        for lease in self._state.leases.detached_leases():
            if not self._is_alive(lease.slot):
                self._state.end_lease(lease, now, out)
        return self._state.leases.num_detached

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
