"""Leases: everything a client holds, which ends with the client's process.

A lease is attached to a session, or detached: the connection is gone but the client's kernel lock shows
that it lives, so it may still read and write what it held; it can come back and resume. A reservation
belongs to the lease of the client that writes, whichever requested it; a pin to the one that requested it; a
watch likewise, at most one per lease and mm_hash, and only while attached.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

from triptych_cache_store.entries.entry_table import Entry
from triptych_common.protocol.ids import MmHash, PinId, ReservationId

SessionId = NewType("SessionId", int)
"""Id of one connection, never reused by the same store process."""


class Watch(NamedTuple):
    """Pin that the client gets when the entry is sealed."""

    num_holders: int
    origin_seq: int  # of the command


@dataclass(slots=True, eq=False)
class Lease:
    """Reservations, pins and watches of one client."""

    lease_id: int
    slot: int  # of the region's client slots
    session_id: SessionId | None  # None: detached
    client: str  # e.g. "encoder-0/worker-0"
    namespace: str  # digest the client announced; "" for none
    reservations: dict[ReservationId, Entry] = field(default_factory=dict)  # it is the writer of these
    pins: dict[PinId, "Pin"] = field(default_factory=dict)
    watches: dict[MmHash, Watch] = field(default_factory=dict)
    last_seq: int = 0
    opened_at: float = 0.0  # monotonic seconds; recovered: when that was

    @property
    def instance(self) -> str:
        return instance_of(self.client)


@dataclass(slots=True, eq=False)
class Pin:
    """Prevents eviction of `entry` until all holders have unpinned it, or the lease ends."""

    pin_id: PinId
    entry: Entry
    lease: Lease
    num_holders: int
    origin_seq: int  # of the command that led to it


def instance_of(client: str) -> str:
    """Instance name of a client: `encoder-0` for `encoder-0/worker-0`."""
    return client.split("/", 1)[0]


class LeaseTable:
    """All leases, found by session, by client name, and by what they hold."""

    def __init__(self) -> None:
        self._by_session: dict[SessionId, Lease] = {}
        self._by_client: dict[str, Lease] = {}
        self._pins: dict[PinId, Pin] = {}
        self._watchers: dict[MmHash, dict[int, Lease]] = {}  # -> lease_id -> lease
        self._writers: dict[ReservationId, Lease] = {}
        self._num_watches = 0

    # ---- leases ----------------------------------------------------------------------------------
    def add_lease(self, lease: Lease) -> None:
        """Add a lease; the caller has checked that its client has none."""
        self._by_client[lease.client] = lease
        if lease.session_id is not None:
            self._by_session[lease.session_id] = lease

    def detach_lease(self, lease: Lease) -> None:
        """Detach a lease whose session is gone while its client lives."""
        if lease.session_id is not None:
            del self._by_session[lease.session_id]
            lease.session_id = None

    def attach_lease(self, lease: Lease, session_id: SessionId) -> None:
        lease.session_id = session_id
        self._by_session[session_id] = lease

    def remove_lease(self, lease: Lease) -> None:
        if lease.reservations or lease.pins or lease.watches:
            raise ValueError(f"the lease of {lease.client} is not empty")
        self.detach_lease(lease)
        del self._by_client[lease.client]

    def find_by_session(self, session_id: SessionId) -> Lease | None:
        return self._by_session.get(session_id)

    def find_by_client(self, client: str) -> Lease | None:
        return self._by_client.get(client)

    def all_leases(self) -> Iterable[Lease]:
        return self._by_client.values()

    def detached_leases(self) -> list[Lease]:
        if self.num_detached == 0:
            return []
        return [lease for lease in self._by_client.values() if lease.session_id is None]

    @property
    def num_sessions(self) -> int:
        return len(self._by_session)

    @property
    def num_detached(self) -> int:
        return len(self._by_client) - len(self._by_session)

    # ---- reservations ----------------------------------------------------------------------------
    def add_reservation(self, writer: Lease, entry: Entry) -> None:
        writer.reservations[entry.reservation_id] = entry
        self._writers[entry.reservation_id] = writer

    def end_reservation(self, reservation_id: ReservationId) -> None:
        writer = self._writers.pop(reservation_id)
        del writer.reservations[reservation_id]

    def writer_of(self, reservation_id: ReservationId) -> Lease:
        return self._writers[reservation_id]

    # ---- pins ------------------------------------------------------------------------------------
    def add_pin(self, pin: Pin) -> None:
        self._pins[pin.pin_id] = pin
        pin.lease.pins[pin.pin_id] = pin

    def end_pin(self, pin: Pin) -> None:
        del self._pins[pin.pin_id]
        del pin.lease.pins[pin.pin_id]

    def find_pin(self, pin_id: PinId) -> Pin | None:
        return self._pins.get(pin_id)

    @property
    def num_pins(self) -> int:
        return len(self._pins)

    # ---- watches ---------------------------------------------------------------------------------
    def add_watch(self, lease: Lease, mm_hash: MmHash, watch: Watch) -> None:
        if mm_hash not in lease.watches:
            self._num_watches += 1
        lease.watches[mm_hash] = watch
        self._watchers.setdefault(mm_hash, {})[lease.lease_id] = lease

    def end_watch(self, lease: Lease, mm_hash: MmHash) -> None:
        if lease.watches.pop(mm_hash, None) is None:
            return
        self._num_watches -= 1
        watchers = self._watchers[mm_hash]
        del watchers[lease.lease_id]
        if not watchers:
            del self._watchers[mm_hash]

    def watchers(self, mm_hash: MmHash) -> tuple[Lease, ...]:
        return tuple(self._watchers.get(mm_hash, {}).values())

    def take_watchers(self, mm_hash: MmHash) -> list[tuple[Lease, Watch]]:
        """End all watches of `mm_hash` and return them with their leases, oldest first."""
        taken = [(lease, lease.watches[mm_hash]) for lease in self.watchers(mm_hash)]
        for lease, _ in taken:
            self.end_watch(lease, mm_hash)
        return taken

    @property
    def num_watches(self) -> int:
        return self._num_watches
