"""Leases: what each session holds. Everything of a session ends with it.

A reservation is the lease of the session that writes, whoever asked for it; a pin of the session that
asked; a watch likewise, at most one per session and mm_hash.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NewType

from triptych_cache_store.entry_table import Entry
from triptych_common.protocol.ids import MmHash, PinId, ReservationId

SessionId = NewType("SessionId", int)
"""One connection. Never used again by the same store process."""


@dataclass(slots=True, eq=False)
class Lease:
    """What one session holds."""

    session_id: SessionId
    client: str  # e.g. "encoder-0/worker-0"
    namespace: str  # digest the client announced; "" for none
    reservations: dict[ReservationId, Entry] = field(default_factory=dict)  # it is the writer of these
    pins: dict[PinId, "Pin"] = field(default_factory=dict)
    watches: dict[MmHash, int] = field(default_factory=dict)  # -> holders of the pin to come

    @property
    def instance(self) -> str:
        return instance_of(self.client)


@dataclass(slots=True, eq=False)
class Pin:
    """Forbids eviction of `entry` until its holders have unpinned, or the lease ends."""

    pin_id: PinId
    entry: Entry
    lease: Lease
    num_holders: int


def instance_of(client: str) -> str:
    """The instance of a client: `encoder-0` of `encoder-0/worker-0`."""
    return client.split("/", 1)[0]


class LeaseTable:
    """All leases, found by session, client name, pin, watched mm_hash and reservation."""

    def __init__(self) -> None:
        self._by_session: dict[SessionId, Lease] = {}
        self._by_client: dict[str, Lease] = {}
        self._pins: dict[PinId, Pin] = {}
        self._watchers: dict[MmHash, dict[SessionId, Lease]] = {}
        self._writers: dict[ReservationId, tuple[Lease, str]] = {}  # -> (writer, client that asked)
        self._num_watches = 0

    # ---- sessions --------------------------------------------------------------------------------
    def open(self, session_id: SessionId, client: str, namespace: str) -> Lease:
        """A lease for a new session; the caller made sure that `client` has none."""
        lease = Lease(session_id, client, namespace)
        self._by_session[session_id] = lease
        self._by_client[client] = lease
        return lease

    def close(self, lease: Lease) -> None:
        """Forget an emptied lease."""
        if lease.reservations or lease.pins or lease.watches:
            raise ValueError(f"the lease of {lease.client} is not empty")
        del self._by_session[lease.session_id]
        del self._by_client[lease.client]

    def of_session(self, session_id: SessionId) -> Lease | None:
        return self._by_session.get(session_id)

    def of_client(self, client: str) -> Lease | None:
        return self._by_client.get(client)

    def all(self) -> Iterable[Lease]:
        return self._by_session.values()

    @property
    def num_sessions(self) -> int:
        return len(self._by_session)

    # ---- reservations ----------------------------------------------------------------------------
    def add_reservation(self, writer: Lease, entry: Entry, requested_by: str) -> None:
        writer.reservations[entry.reservation_id] = entry
        self._writers[entry.reservation_id] = (writer, requested_by)

    def end_reservation(self, reservation_id: ReservationId) -> None:
        writer, _ = self._writers.pop(reservation_id)
        del writer.reservations[reservation_id]

    def writer_of(self, reservation_id: ReservationId) -> Lease:
        return self._writers[reservation_id][0]

    def requester_of(self, reservation_id: ReservationId) -> str:
        """Client name of the session that asked for the reservation."""
        return self._writers[reservation_id][1]

    # ---- pins ------------------------------------------------------------------------------------
    def add_pin(self, pin: Pin) -> None:
        self._pins[pin.pin_id] = pin
        pin.lease.pins[pin.pin_id] = pin

    def end_pin(self, pin: Pin) -> None:
        del self._pins[pin.pin_id]
        del pin.lease.pins[pin.pin_id]

    def pin(self, pin_id: PinId) -> Pin | None:
        return self._pins.get(pin_id)

    @property
    def num_pins(self) -> int:
        return len(self._pins)

    # ---- watches ---------------------------------------------------------------------------------
    def add_watch(self, lease: Lease, mm_hash: MmHash, num_holders: int) -> None:
        """Watch `mm_hash`; a watch that is there already takes the new number of holders."""
        if mm_hash not in lease.watches:
            self._num_watches += 1
        lease.watches[mm_hash] = num_holders
        self._watchers.setdefault(mm_hash, {})[lease.session_id] = lease

    def end_watch(self, lease: Lease, mm_hash: MmHash) -> None:
        """No error when there is none."""
        if lease.watches.pop(mm_hash, None) is None:
            return
        self._num_watches -= 1
        watchers = self._watchers[mm_hash]
        del watchers[lease.session_id]
        if not watchers:
            del self._watchers[mm_hash]

    def watchers(self, mm_hash: MmHash) -> tuple[Lease, ...]:
        return tuple(self._watchers.get(mm_hash, {}).values())

    def take_watchers(self, mm_hash: MmHash) -> list[tuple[Lease, int]]:
        """End all watches of `mm_hash`; who watched, and for how many holders, oldest first."""
        taken = [(lease, lease.watches[mm_hash]) for lease in self.watchers(mm_hash)]
        for lease, _ in taken:
            self.end_watch(lease, mm_hash)
        return taken

    @property
    def num_watches(self) -> int:
        return self._num_watches
