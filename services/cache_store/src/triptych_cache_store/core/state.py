"""All state of the store: a `Space` per memory, leases, counters; steps over several of them. Pure."""

import itertools
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from triptych_cache_store.entries.entry_table import Entry, EntryState, EntryTable
from triptych_cache_store.entries.leases import Lease, LeaseTable, Pin, SessionId
from triptych_cache_store.entries.space import Space
from triptych_cache_store.persistence.journal import RegionJournal
from triptych_common.domain.transports import transport_of
from triptych_common.protocol.ids import MmHash, PinId
from triptych_common.protocol.store import (
    REDIS,
    SHM,
    Descriptor,
    EntrySealed,
    SlabInfo,
    StoreReply,
    Verify,
    WriterLost,
)
from triptych_common.region.layout import RegionLayout
from triptych_common.region.records import NO_BLOCK, PinRecord

BOUNDS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

FailureCode = Literal[
    "bad_frame", "bad_version", "not_hello", "full", "too_large", "unknown_reservation", "unknown_pin",
    "unknown_writer", "not_owner", "spec_mismatch", "internal",
]  # fmt: skip

IDS_PER_SECOND_BITS = 20
"""Ids start at generation << this. A generation is the second a store started in, so ids of successive stores
never collide below a million ids a second."""

MAX_UNCHECKED = 100_000
"""Maximum number of entries queued for their checksum; beyond it the oldest stay without one."""
MAX_VERIFY_REQUESTS = 16
MAX_PAIRS = 1_000
"""Maximum number of instance pairs counted by name, since instance names may change without end."""


@dataclass(slots=True)
class Latencies:
    """Counts of latencies by upper bound (`BOUNDS_S`, then infinity)."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


class Outgoing(NamedTuple):
    """A frame for one session; `closes` ends the session after it."""

    session_id: SessionId
    reply: StoreReply
    closes: bool = False


Out = list[Outgoing]


class Refusal(Exception):
    """Raised for a command that is refused; becomes a `StoreFailure`."""

    def __init__(self, code: FailureCode, detail: str, *, closes: bool = False) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.closes = closes


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Facts about the store that every client receives in its welcome."""

    store: str
    region_path: str
    region_id: str
    generation: int
    layout: RegionLayout


@dataclass(frozen=True, slots=True)
class Slab:
    """Device memory of this store, in blocks of the region's size; its entries end with the store."""

    info: SlabInfo
    space: Space


class HandedOver(NamedTuple):
    """Metric labels: the instances that wrote ("" if unknown) and pinned an entry, and its transport."""

    producer: str
    consumer: str
    transport: str


@dataclass(slots=True)
class Counters:
    """Totals since the start; hits and misses count `PinOrWatch` only."""

    num_seals: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # by command and code
    seal_to_pin: Latencies = field(default_factory=Latencies)  # of an entry's first pin
    num_pinned: Counter[HandedOver] = field(default_factory=Counter)

    def note_pin(self, entry: Entry, consumer: str) -> None:
        pair = HandedOver(entry.producer, consumer, transport_of(entry.memory).value)
        if pair not in self.num_pinned and len(self.num_pinned) >= MAX_PAIRS:
            pair = HandedOver("other", "other", pair.transport)
        self.num_pinned[pair] += 1


class VerifyRequest(NamedTuple):
    """Verify command of a session, which waits for the result."""

    session_id: SessionId
    command: Verify


@dataclass(slots=True)
class VerifyQueue:
    """Work of the verifier; without `takes_checksums`, sealed entries are not queued."""

    takes_checksums: bool = False
    sealed: deque[Entry] = field(default_factory=lambda: deque(maxlen=MAX_UNCHECKED))
    requests: deque[VerifyRequest] = field(default_factory=deque)

    def queue_checksum(self, entry: Entry) -> None:
        if self.takes_checksums:
            self.sealed.append(entry)

    @property
    def is_empty(self) -> bool:
        return not self.sealed and not self.requests


@dataclass(slots=True)
class StoreState:
    """Entries and blocks (`space`), the clients' leases (`leases`), and the record of both (`journal`)."""

    identity: StoreIdentity
    space: Space
    journal: RegionJournal
    leases: LeaseTable = field(default_factory=LeaseTable)
    counters: Counters = field(default_factory=Counters)
    slab: Slab | None = None
    verify_queue: VerifyQueue = field(default_factory=VerifyQueue)
    ids: "itertools.count[int]" = field(init=False)  # of reservations, pins and leases

    def __post_init__(self) -> None:
        self.start_ids_after(0)

    @property
    def table(self) -> EntryTable:
        return self.space.table

    def start_ids_after(self, last_id: int) -> None:
        """Issue only ids above `last_id`."""
        self.ids = itertools.count(max(last_id, self.identity.generation << IDS_PER_SECOND_BITS) + 1)

    def space_in(self, memory: str) -> Space | None:
        """Space that holds tensors in `memory`; None if this store has no such memory."""
        if memory in (SHM, REDIS):
            return self.space
        return self.slab.space if self.slab is not None and self.slab.info.memory == memory else None

    @property
    def spaces(self) -> tuple[Space, ...]:
        return (self.space,) if self.slab is None else (self.space, self.slab.space)

    def space_of(self, entry: Entry) -> Space:
        return self.space if self.slab is None or entry.memory in (SHM, REDIS) else self.slab.space

    def offset_of(self, entry: Entry) -> int:
        """Byte offset of the entry's first block in its memory."""
        layout = self.identity.layout
        if self.space_of(entry) is self.space:
            return layout.offset_of(entry.blocks.start)
        return entry.blocks.start * layout.block_num_bytes

    def describe(self, entry: Entry) -> Descriptor:
        """Descriptor of a sealed entry."""
        return Descriptor(
            mm_hash=entry.mm_hash,
            spec=entry.spec,
            offset=self.offset_of(entry),
            generation=entry.generation,
            memory=entry.memory,
        )

    # ---- steps -----------------------------------------------------------------------------------
    def pin(self, lease: Lease, entry: Entry, num_holders: int, origin_seq: int, now: float) -> Pin:
        """Pin `entry` for `lease`; the caller has checked `has_room_for_pin`."""
        space = self.space_of(entry)
        space.pin(entry, now)
        if entry.sealed_at is not None:
            self.counters.seal_to_pin.observe(max(0.0, now - entry.sealed_at))
            entry.sealed_at = None
        pin = Pin(PinId(next(self.ids)), entry, lease, num_holders, origin_seq)
        self.leases.add_pin(pin)
        self.counters.note_pin(entry, lease.instance)
        block = entry.blocks.start if space is self.space else NO_BLOCK
        self.journal.note_pinned(PinRecord(pin.pin_id, lease.slot, block, num_holders, origin_seq))
        return pin

    def has_room_for_pin(self) -> bool:
        """True if a pin record is free, beyond those set aside for watches."""
        return self.journal.num_free_pins > self.leases.num_watches

    def end_pin(self, pin: Pin, now: float) -> None:
        self.leases.end_pin(pin)
        self.journal.note_unpinned(pin.pin_id)
        space = self.space_of(pin.entry)
        space.unpin(pin.entry, now)
        if pin.entry.is_damaged and pin.entry.state is EntryState.READY:
            space.evict(pin.entry)

    def seal(self, entry: Entry, now: float, out: Out) -> None:
        """Make the entry READY and pin it for every watcher."""
        self.leases.end_reservation(entry.reservation_id)
        self.space_of(entry).seal(entry, now)
        entry.sealed_at = now
        self.counters.num_seals += 1
        self.verify_queue.queue_checksum(entry)
        for lease, watch in self.leases.take_watchers(entry.mm_hash):
            pin = self.pin(lease, entry, watch.num_holders, watch.origin_seq, now)
            push = EntrySealed(seq=0, pin_id=pin.pin_id, descriptor=self.describe(entry))
            _push(lease, push, out)

    def release_reservation(self, entry: Entry, out: Out, died_at: float | None = None) -> None:
        """Free the blocks of a reservation that its writer ended unsealed, or whose writer `died_at`."""
        was_writing = entry.state is EntryState.WRITING
        self.leases.end_reservation(entry.reservation_id)
        self.space_of(entry).release(entry, died_at)
        if was_writing:
            self.push_writer_lost(entry.mm_hash, out)

    def push_writer_lost(self, mm_hash: MmHash, out: Out) -> None:
        """Notify the watchers, unless another reservation is still being written."""
        if not self.table.is_writing(mm_hash):
            for lease in self.leases.watchers(mm_hash):
                _push(lease, WriterLost(seq=0, mm_hash=mm_hash), out)

    def end_watches(self, lease: Lease) -> None:
        for mm_hash in list(lease.watches):
            self.leases.end_watch(lease, mm_hash)

    def end_lease(self, lease: Lease, now: float, out: Out) -> None:
        """End the lease of a client that is gone, and take back everything it held."""
        self.end_watches(lease)  # first, so that it gets no push about itself
        for entry in list(lease.reservations.values()):
            self.release_reservation(entry, out, died_at=now)
        for pin in list(lease.pins.values()):
            self.end_pin(pin, now)
        self.leases.remove_lease(lease)
        self.journal.close_slot(lease.slot)


def _push(lease: Lease, push: EntrySealed | WriterLost, out: Out) -> None:
    if lease.session_id is not None:
        out.append(Outgoing(lease.session_id, push))
