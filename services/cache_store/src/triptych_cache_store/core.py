"""The store's logic: a command comes in, replies and pushes come out. No I/O, no clock, never awaits.

Commands are handled one at a time, so each is atomic: nothing can be sealed between the look and the
watch of `PinOrWatch`. A command that fails changes nothing.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from triptych_cache_store.entry_table import Entry, EntryState, EntryTable
from triptych_cache_store.leases import Lease, LeaseTable, Pin, SessionId
from triptych_cache_store.space import Space
from triptych_cache_store.views import Counters, describe, entry_state, stats
from triptych_common.protocol import store as wire
from triptych_common.protocol.ids import MmHash, PinId, ReservationId
from triptych_common.region.layout import RegionLayout

MAX_LISTED = 2000  # what fits into one frame
ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class Outgoing(NamedTuple):
    """A frame for one session. `closes`: the session ends after it."""

    session_id: SessionId
    reply: wire.StoreReply
    closes: bool = False


Out = list[Outgoing]
FailureCode = Literal[
    "bad_frame",
    "bad_version",
    "not_hello",
    "full",
    "too_large",
    "unknown_reservation",
    "unknown_pin",
    "unknown_writer",
    "not_owner",
    "spec_mismatch",
    "internal",
]


class Refusal(Exception):
    """A command that cannot be done; becomes a `StoreFailure`."""

    def __init__(self, code: FailureCode, detail: str, *, closes: bool = False) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.closes = closes


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What every client is told at hello."""

    store: str
    region_path: str
    generation: int
    layout: RegionLayout


Handler = Callable[[Lease, Any, float, Out], wire.StoreReply]


class StoreCore:
    """All state of the store. `now` is in monotonic seconds everywhere.

    `is_connected` tells whether a session's peer is still there; it is asked when a second client wants
    the name of the first.
    """

    def __init__(
        self, identity: StoreIdentity, space: Space, *, is_connected: Callable[[SessionId], bool]
    ) -> None:
        self.identity = identity
        self.space = space
        self.leases = LeaseTable()
        self.counters = Counters()
        self._is_connected = is_connected
        self._ids = itertools.count(1)  # reservations and pins share one sequence
        self._handlers: dict[type[wire.StoreFrame], Handler] = {
            wire.Ping: self._ping,
            wire.Reserve: self._reserve,
            wire.Seal: self._seal,
            wire.Cancel: self._cancel,
            wire.PinOrWatch: self._pin_or_watch,
            wire.Unwatch: self._unwatch,
            wire.Unpin: self._unpin,
            wire.Lookup: self._lookup,
            wire.StatsQuery: self._stats,
            wire.ListEntries: self._list,
            wire.Evict: self._evict,
        }

    @property
    def table(self) -> EntryTable:
        return self.space.table

    # ---- the three ways in -----------------------------------------------------------------------
    def handle(self, session_id: SessionId, command: wire.StoreCommand, now: float) -> list[Outgoing]:
        """Carry out `command`; the reply to it comes first."""
        out: Out = []
        try:
            if isinstance(command, wire.Hello):
                reply = self._hello(session_id, command, now, out)
            else:
                lease = self.leases.of_session(session_id)
                if lease is None:
                    raise Refusal("not_hello", "the first frame of a session must be hello", closes=True)
                reply = self._handlers[type(command)](lease, command, now, out)
        except Refusal as refusal:
            failure = wire.StoreFailure(seq=command.seq, code=refusal.code, detail=refusal.detail)
            out.insert(0, Outgoing(session_id, failure, refusal.closes))
            return out
        out.insert(0, Outgoing(session_id, reply))
        return out

    def disconnect(self, session_id: SessionId, now: float) -> list[Outgoing]:
        """The session has ended: give back what it held, tell who waited for what it would have written."""
        out: Out = []
        lease = self.leases.of_session(session_id)
        if lease is not None:
            self._end_lease(lease, now, out)
        return out

    # ---- commands --------------------------------------------------------------------------------
    def _hello(self, session_id: SessionId, command: wire.Hello, now: float, out: Out) -> wire.StoreReply:
        if command.version != wire.STORE_PROTOCOL_VERSION:
            detail = f"this store speaks version {wire.STORE_PROTOCOL_VERSION}, not {command.version}"
            raise Refusal("bad_version", detail, closes=True)
        if self.leases.of_session(session_id) is not None:
            raise Refusal("bad_frame", "hello was said before", closes=True)
        holder = self.leases.of_client(command.client)
        if holder is not None:
            if self._is_connected(holder.session_id):
                raise Refusal("not_owner", f"{command.client} has a live session", closes=True)
            self._end_lease(holder, now, out)
        self.leases.open(session_id, command.client, command.namespace_digest or "")
        return wire.Welcome(
            seq=command.seq,
            store=self.identity.store,
            generation=self.identity.generation,
            region_path=self.identity.region_path,
            region_num_bytes=self.identity.layout.num_bytes,
            block_num_bytes=self.identity.layout.block_num_bytes,
        )

    def _ping(self, lease: Lease, command: wire.Ping, now: float, out: Out) -> wire.StoreReply:
        return wire.Done(seq=command.seq)

    def _reserve(self, lease: Lease, command: wire.Reserve, now: float, out: Out) -> wire.StoreReply:
        spec, mm_hash = command.spec, MmHash(command.mm_hash)
        if math.prod(spec.shape) * ITEM_BYTES[spec.dtype] != spec.num_bytes:
            raise Refusal(
                "spec_mismatch", f"{spec.dtype} of shape {spec.shape} is not {spec.num_bytes} bytes"
            )
        present = self.table.sealed(mm_hash) or self.table.first_writing(mm_hash)
        if present is not None and present.spec != spec:
            raise Refusal("spec_mismatch", f"the entry has shape {present.spec.shape}, {present.spec.dtype}")
        if present is not None and present.state is not EntryState.WRITING:
            return wire.AlreadySealed(seq=command.seq, spec=present.spec)
        writer = lease if command.writer is None else self.leases.of_client(command.writer)
        if writer is None:
            raise Refusal("unknown_writer", f"{command.writer} has no session")
        num_blocks = self.identity.layout.num_blocks_for(spec.num_bytes)
        if num_blocks > self.space.pool.num_blocks:
            raise Refusal("too_large", f"{spec.num_bytes} bytes exceed the region")
        blocks = self.space.try_allocate(num_blocks)
        if blocks is None:
            raise Refusal("full", f"no {spec.num_bytes} bytes in one range that nobody uses")
        entry = Entry(
            ReservationId(next(self._ids)),
            mm_hash,
            spec,
            blocks,
            self.identity.generation,
            writer.namespace,
            now,
        )
        self.table.add(entry)
        self.leases.add_reservation(writer, entry, requested_by=lease.client)
        return wire.Reserved(
            seq=command.seq,
            reservation_id=entry.reservation_id,
            offset=self.identity.layout.offset_of(blocks.start),
            generation=entry.generation,
        )

    def _seal(self, lease: Lease, command: wire.Seal, now: float, out: Out) -> wire.StoreReply:
        entry = self._reservation(command.reservation_id)
        if self.leases.writer_of(entry.reservation_id) is not lease:
            raise Refusal("not_owner", f"reservation {entry.reservation_id} is written by another session")
        self.leases.end_reservation(entry.reservation_id)
        if entry.state is EntryState.ABANDONED or self.table.sealed(entry.mm_hash) is not None:
            self.space.release(entry)  # cancelled meanwhile, or another reservation was sealed first
            return wire.Done(seq=command.seq)
        self.space.seal(entry, now)
        self.counters.num_seals += 1
        for watcher, num_holders in self.leases.take_watchers(entry.mm_hash):
            pin = self._pin(watcher, entry, num_holders, now)
            push = wire.EntrySealed(
                seq=0, pin_id=pin.pin_id, descriptor=describe(entry, self.identity.layout)
            )
            out.append(Outgoing(watcher.session_id, push))
        return wire.Done(seq=command.seq)

    def _cancel(self, lease: Lease, command: wire.Cancel, now: float, out: Out) -> wire.StoreReply:
        entry = self._reservation(command.reservation_id)
        writer = self.leases.writer_of(entry.reservation_id)
        if lease is writer:
            self._release_reservation(entry, out)
            return wire.Done(seq=command.seq)
        asked = self.leases.requester_of(entry.reservation_id)
        if lease.client != asked and lease.instance != writer.instance:
            raise Refusal("not_owner", f"reservation {entry.reservation_id} belongs to another instance")
        if entry.state is EntryState.WRITING:  # the writer may be writing now: its blocks wait for it
            self.table.abandon(entry)
            self._tell_writer_lost(entry.mm_hash, out)
        return wire.Done(seq=command.seq)

    def _pin_or_watch(self, lease: Lease, command: wire.PinOrWatch, now: float, out: Out) -> wire.StoreReply:
        mm_hash = MmHash(command.mm_hash)
        entry = self.table.sealed(mm_hash)
        if entry is None:
            self.counters.num_misses += 1
            self.leases.add_watch(lease, mm_hash, command.num_holders)
            return wire.Watching(seq=command.seq, mm_hash=mm_hash, writing=self.table.is_writing(mm_hash))
        self.counters.num_hits += 1
        pin = self._pin(lease, entry, command.num_holders, now)
        return wire.Pinned(
            seq=command.seq, pin_id=pin.pin_id, descriptor=describe(entry, self.identity.layout)
        )

    def _unwatch(self, lease: Lease, command: wire.Unwatch, now: float, out: Out) -> wire.StoreReply:
        self.leases.end_watch(lease, MmHash(command.mm_hash))
        return wire.Done(seq=command.seq)

    def _unpin(self, lease: Lease, command: wire.Unpin, now: float, out: Out) -> wire.StoreReply:
        pin = self.leases.pin(PinId(command.pin_id))
        if pin is None:
            raise Refusal("unknown_pin", f"no pin {command.pin_id}")
        if lease.instance != pin.lease.instance:
            raise Refusal("not_owner", f"pin {pin.pin_id} belongs to another instance")
        pin.num_holders -= 1
        if pin.num_holders == 0:
            self._end_pin(pin, now)
        return wire.Done(seq=command.seq)

    def _lookup(self, lease: Lease, command: wire.Lookup, now: float, out: Out) -> wire.StoreReply:
        entries = tuple(entry_state(self.table, MmHash(mm_hash), now) for mm_hash in command.mm_hashes)
        return wire.Entries(seq=command.seq, entries=entries)

    def _stats(self, lease: Lease, command: wire.StatsQuery, now: float, out: Out) -> wire.StoreReply:
        return stats(command.seq, self.identity, self.space, self.leases, self.counters)

    def _list(self, lease: Lease, command: wire.ListEntries, now: float, out: Out) -> wire.StoreReply:
        mm_hashes = itertools.islice(self._mm_hashes(), min(command.limit, MAX_LISTED))
        return wire.Entries(
            seq=command.seq, entries=tuple(entry_state(self.table, each, now) for each in mm_hashes)
        )

    def _evict(self, lease: Lease, command: wire.Evict, now: float, out: Out) -> wire.StoreReply:
        if command.mm_hash is None:
            self.space.evict_all()
        elif (entry := self.space.evictable(MmHash(command.mm_hash))) is not None:
            self.space.evict(entry)
        return wire.Done(seq=command.seq)

    # ---- steps -----------------------------------------------------------------------------------
    def _mm_hashes(self) -> Iterator[MmHash]:
        seen: set[MmHash] = set()
        for entry in itertools.chain(self.table.all_sealed(), self.table.all_unsealed()):
            if entry.state is not EntryState.ABANDONED and entry.mm_hash not in seen:
                seen.add(entry.mm_hash)
                yield entry.mm_hash

    def _reservation(self, reservation_id: int) -> Entry:
        entry = self.table.reservation(ReservationId(reservation_id))
        if entry is None:
            raise Refusal("unknown_reservation", f"no reservation {reservation_id}")
        return entry

    def _pin(self, lease: Lease, entry: Entry, num_holders: int, now: float) -> Pin:
        self.space.pin(entry, now)
        pin = Pin(PinId(next(self._ids)), entry, lease, num_holders)
        self.leases.add_pin(pin)
        return pin

    def _end_pin(self, pin: Pin, now: float) -> None:
        self.leases.end_pin(pin)
        self.space.unpin(pin.entry, now)

    def _release_reservation(self, entry: Entry, out: Out) -> None:
        """Its writer is done with it without a seal: the blocks are free."""
        was_writing = entry.state is EntryState.WRITING
        self.leases.end_reservation(entry.reservation_id)
        self.space.release(entry)
        if was_writing:
            self._tell_writer_lost(entry.mm_hash, out)

    def _tell_writer_lost(self, mm_hash: MmHash, out: Out) -> None:
        if not self.table.is_writing(mm_hash):
            push = wire.WriterLost(seq=0, mm_hash=mm_hash)
            out.extend(Outgoing(watcher.session_id, push) for watcher in self.leases.watchers(mm_hash))

    def _end_lease(self, lease: Lease, now: float, out: Out) -> None:
        for mm_hash in list(lease.watches):  # first, so that it is not told about itself
            self.leases.end_watch(lease, mm_hash)
        for entry in list(lease.reservations.values()):
            self._release_reservation(entry, out)
        for pin in list(lease.pins.values()):
            self._end_pin(pin, now)
        self.leases.close(lease)
