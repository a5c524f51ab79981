"""Messages on the cache_store's Unix socket: length-prefixed JSON frames (`codec.frame`).

A client sends `StoreCommand`s, each with a `seq` of its own; the store answers each with one
`StoreReply` of the same `seq`, in any order. Pushes (`EntrySealed`, `WriterLost`) have `seq` 0.
Bytes of tensors never travel here: a `Descriptor` has their place in the region.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, StringConstraints

from triptych_common.protocol.ids import MmHashText, Name
from triptych_common.protocol.messages import Message

STORE_PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 20
MAX_HOLDERS = 1024
MAX_LISTED = 2000  # entries in one answer: what fits into a frame

DType = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

SHM, REDIS = "shm", "redis"
Memory = Annotated[str, StringConstraints(pattern=r"^(shm|redis|cuda:GPU-[0-9a-f-]{36})$")]
"""Memory with bytes of tensors: the region, Redis (whose entries only reserve blocks of the region), or the
store's slab on the GPU of this UUID."""


def device_memory(device_uuid: str) -> str:
    """Return the `Memory` of a slab on the GPU `device_uuid` ("GPU-...")."""
    return f"cuda:{device_uuid}"


Extent = Annotated[int, Field(gt=0, lt=2**63)]  # longer numbers cannot be written as JSON again


class TensorSpec(Message):
    """Shape, dtype and size of a tensor."""

    shape: tuple[Extent, Extent]  # (num_embeds, width)
    dtype: DType
    num_bytes: Extent


class Descriptor(Message):
    """Place of a sealed tensor. Valid while the pin that came with it is held."""

    mm_hash: MmHashText
    spec: TensorSpec
    offset: NonNegativeInt  # bytes from the start of the region file; aligned to the block size
    generation: PositiveInt  # fences descriptors from before a store restart
    memory: Memory = SHM  # of a slab: `offset` counts from its start


class SlabInfo(Message):
    """GPU memory that the store owns. It ends with the store: its entries are of one generation."""

    memory: Memory
    num_bytes: PositiveInt
    ipc_handle: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]  # `cudaIpcMemHandle_t`, in hex


class StoreFrame(Message):
    seq: Annotated[int, Field(ge=0, lt=2**63)]


# ---- commands, client -> store -------------------------------------------------------------------
class Resume(Message):
    """Resume a session whose connection broke but whose process lives on: its lease is still its own.

    The store undoes unanswered commands, so that the client can send them again: reservations and pins from
    the commands in `undo_seqs` (`Reserve`, `PinOrWatch`, watches without their push).
    """

    region_id: str
    lease_id: PositiveInt
    undo_seqs: tuple[PositiveInt, ...] = Field(default=(), max_length=50_000)


class Hello(StoreFrame):
    """First frame of every connection."""

    kind: Literal["hello"] = "hello"
    version: PositiveInt
    client: Name  # e.g. "encoder-0/worker-0"; unique among live sessions
    namespace_digest: str | None = None
    resume: Resume | None = None


class Ping(StoreFrame):
    kind: Literal["ping"] = "ping"


class Reserve(StoreFrame):
    """Hold blocks for a tensor that does not exist yet.

    `writer` names the session (by `client`) that will write; the reservation is its lease, not the
    caller's, so blocks stay untouchable until the process that may write them is gone.
    """

    kind: Literal["reserve"] = "reserve"
    mm_hash: MmHashText
    spec: TensorSpec
    writer: Name | None = None  # None: the caller
    may_use_reserve: bool = False  # granted preallocations may use the store's reserve
    tenant: Annotated[Name, Field(max_length=64)] | None = None  # whose quota it counts against
    memory: Memory = SHM  # of the slab: refused as too_large by a store that has none there


class Seal(StoreFrame):
    """Writer -> store: the tensor is complete. The first seal of an mm_hash wins."""

    kind: Literal["seal"] = "seal"
    reservation_id: PositiveInt


class Cancel(StoreFrame):
    """Writer, or session that reserved, -> store: the tensor will not be written.

    From any session but the writer's the blocks wait until the writer is gone, unless `is_unwritten`: the
    instance knows that its writer never had the order, or is done with it.
    """

    kind: Literal["cancel"] = "cancel"
    reservation_id: PositiveInt
    is_unwritten: bool = False


class PinOrWatch(StoreFrame):
    """Pin a sealed entry atomically, or push `EntrySealed` (already pinned) when it is sealed."""

    kind: Literal["pin_or_watch"] = "pin_or_watch"
    mm_hash: MmHashText
    num_holders: Annotated[int, Field(ge=1, le=MAX_HOLDERS)] = (
        1  # unpins needed until the pin ends (tensor-parallel ranks)
    )


class Unwatch(StoreFrame):
    kind: Literal["unwatch"] = "unwatch"
    mm_hash: MmHashText


class Unpin(StoreFrame):
    """End a pin, also from another session of the same instance (the worker that dropped the view)."""

    kind: Literal["unpin"] = "unpin"
    pin_id: PositiveInt


class Lookup(StoreFrame):
    """Ask for the state of entries, without touching their recency."""

    kind: Literal["lookup"] = "lookup"
    mm_hashes: tuple[MmHashText, ...] = Field(max_length=1000)


class StatsQuery(StoreFrame):
    kind: Literal["stats"] = "stats"


class ListEntries(StoreFrame):
    """List entries by hash, from the first one behind `after` on, for operators.

    A client that reads page by page, each after the last hash of the one before, sees every lasting entry
    once. `MAX_LISTED` at most; fewer than `limit`: the end.
    """

    kind: Literal["list"] = "list"
    limit: PositiveInt = 1000
    after: MmHashText | None = None  # None: from the beginning


class Evict(StoreFrame):
    """Evict one unpinned entry, or all (`mm_hash` None), for operators."""

    kind: Literal["evict"] = "evict"
    mm_hash: MmHashText | None = None


class Verify(StoreFrame):
    """Check header and checksum of every sealed entry, for operators. Answered when all are checked."""

    kind: Literal["verify"] = "verify"
    evict: bool = False  # damaged entries go: at once, or with their last pin


class MetricsQuery(StoreFrame):
    kind: Literal["metrics"] = "metrics"


StoreCommand = Annotated[
    Hello
    | Ping
    | Reserve
    | Seal
    | Cancel
    | PinOrWatch
    | Unwatch
    | Unpin
    | Lookup
    | StatsQuery
    | ListEntries
    | Evict
    | Verify
    | MetricsQuery,
    Field(discriminator="kind"),
]


# ---- replies and pushes, store -> client ---------------------------------------------------------
class Welcome(StoreFrame):
    kind: Literal["welcome"] = "welcome"
    store: Name
    generation: PositiveInt
    region_path: str
    region_num_bytes: PositiveInt
    block_num_bytes: PositiveInt
    region_id: str = ""  # fresh for every region file; another one: every lease is gone
    lease_id: NonNegativeInt = 0  # the same as before: the lease was resumed
    client_slot: NonNegativeInt = 0  # to lock in the region file, while anything of the region is in use
    last_seq: NonNegativeInt = 0  # of a resumed lease: commands up to this seq were carried out
    slab: SlabInfo | None = None  # None: the store has no device memory


class Done(StoreFrame):
    """Success without a value (ping, seal, cancel, unpin, unwatch, evict)."""

    kind: Literal["done"] = "done"


class Reserved(StoreFrame):
    kind: Literal["reserved"] = "reserved"
    reservation_id: PositiveInt
    offset: NonNegativeInt
    generation: PositiveInt
    memory: Memory = SHM


class AlreadySealed(StoreFrame):
    """Answer to `Reserve`: nothing to write, the entry is READY."""

    kind: Literal["already_sealed"] = "already_sealed"
    spec: TensorSpec
    memory: Memory = SHM


class Pinned(StoreFrame):
    kind: Literal["pinned"] = "pinned"
    pin_id: PositiveInt
    descriptor: Descriptor


class Watching(StoreFrame):
    """Answer to `PinOrWatch`: not sealed. `writing`: there is a reservation for it."""

    kind: Literal["watching"] = "watching"
    mm_hash: MmHashText
    writing: bool


class EntrySealed(StoreFrame):
    """Push to a watcher: the entry was sealed and is pinned for you."""

    kind: Literal["entry_sealed"] = "entry_sealed"
    pin_id: PositiveInt
    descriptor: Descriptor


class WriterLost(StoreFrame):
    """Push to a watcher: the last reservation for this mm_hash ended without a seal. The watch remains."""

    kind: Literal["writer_lost"] = "writer_lost"
    mm_hash: MmHashText


class EntryInfo(Message):
    mm_hash: MmHashText
    state: Literal["absent", "writing", "ready", "pinned"]
    spec: TensorSpec | None = None
    num_pins: NonNegativeInt = 0
    age_s: float = 0.0
    memory: Memory = SHM


class Entries(StoreFrame):
    """Answer to `Lookup` and `ListEntries`."""

    kind: Literal["entries"] = "entries"
    entries: tuple[EntryInfo, ...]


class StoreStats(StoreFrame):
    kind: Literal["store_stats"] = "store_stats"
    generation: PositiveInt
    region_num_bytes: PositiveInt
    free_num_bytes: NonNegativeInt
    writing_num_bytes: NonNegativeInt
    ready_num_bytes: NonNegativeInt
    pinned_num_bytes: NonNegativeInt
    abandoned_num_bytes: NonNegativeInt
    num_entries: NonNegativeInt
    num_reservations: NonNegativeInt
    num_pins: NonNegativeInt
    num_watches: NonNegativeInt
    num_sessions: NonNegativeInt
    num_seals_total: NonNegativeInt
    num_hits_total: NonNegativeInt
    num_misses_total: NonNegativeInt
    num_evictions_total: NonNegativeInt
    slab_num_bytes: NonNegativeInt = 0
    slab_free_num_bytes: NonNegativeInt = 0


class EntryFault(Message):
    """Fault of a sealed entry: its header differs from the store's record, or its bytes do."""

    mm_hash: MmHashText
    fault: Literal["header", "checksum"]
    num_pins: NonNegativeInt = 0


class Verified(StoreFrame):
    """Answer to `Verify`: entries checked, and faults."""

    kind: Literal["verified"] = "verified"
    num_intact: NonNegativeInt  # as when their checksum was taken
    num_recorded: NonNegativeInt  # had no checksum; they have one now
    num_gone: NonNegativeInt  # evicted meanwhile
    num_damaged: NonNegativeInt
    num_bytes: NonNegativeInt  # read
    elapsed_s: float
    damaged: tuple[EntryFault, ...] = ()  # the first 1000


class StoreMetrics(StoreFrame):
    """Answer to `MetricsQuery`: metrics in Prometheus' text format."""

    kind: Literal["store_metrics"] = "store_metrics"
    text: str


class StoreFailure(StoreFrame):
    """The command failed. `code` is stable, `detail` for people."""

    kind: Literal["failure"] = "failure"
    code: Literal[
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
    detail: str


StoreReply = Annotated[
    Welcome
    | Done
    | Reserved
    | AlreadySealed
    | Pinned
    | Watching
    | EntrySealed
    | WriterLost
    | Entries
    | StoreStats
    | Verified
    | StoreMetrics
    | StoreFailure,
    Field(discriminator="kind"),
]
