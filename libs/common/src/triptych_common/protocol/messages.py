"""Every message that travels on Redis Streams. docs/reference/protocol.md lists their senders and readers.

Commands are imperative (`EncodeJob`), events past tense (`EncodeCompleted`). A message is immutable,
is validated when it is read (`codec.decode`). Tensors never travel here.

During an upgrade two releases share a deployment: fields that a later release has added are ignored. Such a
field has a default, and a reader that ignores it still does right; any other change raises `SCHEMA_VERSION`.
"""

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
)

from triptych_common.protocol.ids import MmHashText, Name, NamespaceDigestText
from triptych_common.protocol.item_record import MAX_PIECES, ItemRecord
from triptych_common.protocol.urls import BaseUrlText, HostText

SCHEMA_VERSION = 2
IMAGE_FORMAT_PATTERN = r"^[A-Z0-9]{1,16}$"  # Pillow's names of formats
MAX_IMAGE_SIDE = 1 << 20  # pixels; PNG and BMP can declare more, which the gateway refuses
MAX_ADAPTERS = 1000  # that one instance announces
MAX_ADAPTER_CHARS = 200
MAX_REASON_CHARS = 300
MAX_FABRIC_LINKS = 64  # that one agent announces


Reason = Annotated[str, StringConstraints(max_length=MAX_REASON_CHARS)]
Flow = Annotated[str, StringConstraints(max_length=64, pattern=r"^[0-9a-f]*$")]


class Message(BaseModel):
    """Base of every wire message. `TYPE` names it in the envelope."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    TYPE: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.TYPE = cls.__name__


class Transport(StrEnum):
    PINNED_SHM = "pinned_shm"  # the region; on a GPU one copy on each side
    CUDA_IPC = "cuda_ipc"  # the store's slab on the GPU
    REDIS = "redis"  # the bytes travel through Redis


class Modality(StrEnum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


class Requester(Message):
    """Requester of an item: one (request, item) at one gateway, for one prefill_decode."""

    request_id: Name
    item_index: NonNegativeInt  # position among the request's media items
    gateway: Name
    prefill_decode: Name


RequesterKey = tuple[str, int]  # (request id, item index), unique per requester


def requester_key(requester: Requester) -> RequesterKey:
    return requester.request_id, requester.item_index


class ImageProperties(Message):
    """Image properties from the header, inside `EncodeJob`. The encoder decodes that image, or refuses."""

    format: str = Field(pattern=IMAGE_FORMAT_PATTERN)
    width: int = Field(ge=1, le=MAX_IMAGE_SIDE)  # pixels, before any orientation is applied
    height: int = Field(ge=1, le=MAX_IMAGE_SIDE)

    @property
    def num_pixels(self) -> int:
        return self.width * self.height


class EncodeClass(StrEnum):
    """Classes of encode jobs, first served first; none waits for ever (`domain.fair_queue`)."""

    INTERACTIVE = "interactive"  # a caller waits for the answer
    BATCH = "batch"  # of a batch, or of a request of low priority
    AHEAD = "ahead"  # of an uploaded file that no request has named yet


class EncodeJob(Message):
    """Gateway -> encoders of one namespace (`encode-jobs:{namespace_digest}`): encode one media item.

    The media travel in the envelope's `blob` when small; otherwise `media_url` names where the
    gateway serves them (an unguessable path, valid while the request lives).
    """

    job_id: Name
    mm_hash: MmHashText
    modality: Modality
    media_num_bytes: PositiveInt
    media_url: str | None = None
    image: ImageProperties | None = None  # None: not an image; an encoder refuses an image without it
    mm_processor_kwargs: dict[str, Any] = Field(default_factory=dict)
    media_io_kwargs: dict[str, Any] = Field(default_factory=dict)
    piece_rows: NonNegativeInt = 0  # of a video: the fewest that a piece of it has; 0: it stays in one
    requesters: tuple[Requester, ...]
    attempt: PositiveInt = 1
    namespace_digest: NamespaceDigestText  # namespace of the mm_hash; encoders of another one refuse it
    encode_class: EncodeClass = EncodeClass.INTERACTIVE
    flow: Flow = ""  # jobs of one flow share its turns: a digest that stands for a tenant, or an API key


class EncoderCacheMetadata(Message):
    """Encoder -> prefill_decode (`metadata:{instance}`) and gateway (`encode-results:{instance}`).

    Sent once the placeholder sizes are exact and the region is reserved, before the encoder has run.
    """

    job_id: Name
    mm_hash: MmHashText
    modality: Modality
    num_embeds: PositiveInt  # rows of the encoder output; can be less than the placeholder's length
    width: PositiveInt  # columns: of this item, since modalities differ; above the hidden size with DeepStack
    dtype: Literal["float32", "bfloat16", "float16"]
    num_bytes: PositiveInt
    record: ItemRecord  # for prefill_decode's renderer
    encoder: Name
    store: Name
    sealed: bool  # True: the entry was in the store already, nothing will be encoded
    requesters: tuple[Requester, ...]
    transport: Transport = Transport.PINNED_SHM


class EncodeCompleted(Message):
    """Encoder -> gateway (`encode-results:{instance}`): the entry is sealed."""

    job_id: Name
    mm_hash: MmHashText
    encoder: Name
    encode_s: NonNegativeFloat


class FailureKind(StrEnum):
    BAD_MEDIA = "bad_media"  # the media cannot be decoded or processed: never retried
    TOO_LARGE = "too_large"  # more rows than a consumer or the store can ever hold: never retried
    MEDIA_GONE = "media_gone"  # the gateway no longer serves the media
    STORE_FULL = "store_full"  # no space within the deadline: retryable
    ENCODER_ERROR = "encoder_error"  # the engine failed: retryable
    EXPIRED = "expired"  # the deadline passed before the job was started
    DEAD_LETTER = "dead_letter"  # given up after too many deliveries


class EncodeFailed(Message):
    """Encoder -> gateway (`encode-results:{instance}`): this job will produce nothing."""

    job_id: Name
    mm_hash: MmHashText
    encoder: Name
    kind: FailureKind
    detail: str = Field(max_length=2000)  # for the caller; holds no path, address or secret


class Decision(StrEnum):
    GRANTED = "granted"
    DECLINED = "declined"


class Preallocation(Message):
    """prefill_decode -> encoder (`preallocations:{instance}`): may this (request, item) be sent?"""

    request_id: Name
    item_index: NonNegativeInt
    job_id: Name
    mm_hash: MmHashText
    prefill_decode: Name
    decision: Decision
    reason: Literal["", "prefix_cached", "request_gone", "too_large"] = ""


class Outcome(StrEnum):
    INJECTED = "injected"
    SKIPPED = "skipped"
    FAILED = "failed"


class ItemAck(Message):
    """prefill_decode, or the gateway, -> encoder (`acks:{instance}`): the final ack of (request, item)."""

    request_id: Name
    item_index: NonNegativeInt
    job_id: Name
    mm_hash: MmHashText
    prefill_decode: Name
    outcome: Outcome
    detail: str = Field(default="", max_length=500)


class EncodeNeeded(Message):
    """prefill_decode -> gateway (`encode-results:{instance}`): the store lacks an item of known sizes."""

    request_id: Name
    item_index: NonNegativeInt
    mm_hash: MmHashText
    prefill_decode: Name
    reason: Literal["absent", "writer_lost", "evicted"]


class Role(StrEnum):
    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE_PREFILL = "encode-prefill"
    PREFILL_DECODE = "prefill-decode"
    ENCODE_PREFILL_DECODE = "encode-prefill-decode"
    GATEWAY = "gateway"
    FABRIC = "fabric"


class Sharing(StrEnum):
    """Ways in which engines get the cores, or the GPU, that others leave idle."""

    NONE = "none"  # an engine has its own alone
    CORES = "cores"  # on the CPU: its threads also run on cores that others leave idle
    MPS = "mps"  # on a GPU: kernels of several processes run at once
    TIME_SLICES = "time_slices"  # on a GPU: its driver lets one process run after the other
    UNKNOWN = (
        "unknown"  # the driver cannot be asked: NVIDIA's bindings are missing, or it is no GPU of theirs
    )


class Compute(Message):
    """Compute resources of an engine and how it shares them, for people; inside `InstanceRecord`."""

    sharing: Sharing
    policy: str | None = None  # None: none has an effect
    cores: tuple[NonNegativeInt, ...] = ()  # CPU cores that it owns; empty: any
    gpu: str | None = None  # as in CUDA_VISIBLE_DEVICES; None: the CPU
    num_engines: PositiveInt = 1  # on this GPU, as planned
    num_multiprocessors: PositiveInt | None = None  # of the GPU, that it may use at once
    thread_percentage: str | None = None  # CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
    priority: str | None = None  # CUDA_MPS_CLIENT_PRIORITY


class KvTransfer(Message):
    """KV cache transfer of a language-model instance, inside `InstanceRecord`.

    A KV cache may go from one instance to another where connector and compatibility are equal: those digest
    what vLLM needs to be alike on both sides (model, dtype, block size, cache layout, vLLM's version).
    """

    connector: Name  # vLLM's name of its KV connector
    compatibility: Name
    lease_s: PositiveFloat  # a prefilled KV cache that no instance reads is freed after that long


class ServingLoad(Message):
    """Load of a language-model instance at its last heartbeat, inside `InstanceRecord`."""

    num_beats: PositiveInt  # grows with each heartbeat of this boot: a load is new if it grew
    num_running: NonNegativeInt  # requests that its engine computes
    num_waiting: NonNegativeInt  # requests that wait for their turn or their items
    kv_usage: Annotated[float, Field(ge=0, le=1)] | None = None  # of its KV cache; None: it does not know


class FabricTransport(StrEnum):
    """Transports of an entry's bytes from one host's store to another's."""

    TCP = "tcp"
    NIXL = "nixl"  # NIXL over UCX: RDMA where the hosts have it


class FabricEndpoint(Message):
    """Address at which a store's fabric agent takes entries of other hosts, inside `InstanceRecord`."""

    host: HostText
    port: Annotated[int, Field(ge=1, le=65535)]
    generation: PositiveInt  # its store's generation: directory entries of another one are gone
    transports: tuple[FabricTransport, ...] = Field(
        default=(FabricTransport.TCP,), min_length=1
    )  # best first


class FabricLink(Message):
    """Link from one agent to another host's store, as the first one measures it; inside `FabricLoad`."""

    target: Name  # store
    transport: FabricTransport
    is_up: bool  # a connection stands
    num_in_flight: NonNegativeInt = 0  # entries
    num_bytes: NonNegativeInt = 0  # sent since the agent started
    bytes_per_s: NonNegativeFloat | None = None  # of the last transfer that ended well
    failure: Name | None = None  # the last one's kind; None: none has failed
    failed_s: NonNegativeFloat | None = None  # seconds since the failure


class FabricLoad(Message):
    """Store and links of a fabric agent at its last heartbeat, inside `InstanceRecord`."""

    num_entries: NonNegativeInt  # sealed, in its store
    entries_num_bytes: NonNegativeInt
    free_num_bytes: NonNegativeInt  # of its store, without an eviction
    links: tuple[FabricLink, ...] = Field(default=(), max_length=MAX_FABRIC_LINKS)


AdapterName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ADAPTER_CHARS)]
PlaceholderToken = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class InstanceRecord(Message):
    """Any service -> registry: the instance is alive. Heartbeats renew it (a key with a time to live)."""

    instance: Name
    boot_id: Name
    role: Role
    url: BaseUrlText | None = None  # HTTP base, for roles that are called by HTTP
    model: str | None = None  # served model name
    adapters: tuple[AdapterName, ...] = Field(default=(), max_length=MAX_ADAPTERS)  # LoRA's
    namespace_digest: NamespaceDigestText | None = None  # weights, processor, dtype, vLLM version
    dtype: str | None = None
    item_limits: dict[Modality, PositiveInt] = Field(default_factory=dict)  # of a request, that it encodes
    unserved_modalities: dict[Modality, Reason] = Field(default_factory=dict)  # that its model has, and why
    placeholder_tokens: tuple[PlaceholderToken, ...] = ()  # of its model; text may not contain them
    max_item_embeds: PositiveInt | None = None  # largest item this instance can hold
    max_model_len: PositiveInt | None = None  # tokens of a prompt and its answer, together
    store: Name | None = None
    num_slots: NonNegativeInt = 0  # jobs or requests it works on at once
    row_s: PositiveFloat | None = None  # seconds of an encoder for a row; None: it has not encoded enough
    draining: bool = False
    transports: tuple[Transport, ...] = ()  # how tensors may come to it or go from it, best first
    device: Name | None = None  # UUID of its GPU, for cuda_ipc
    slab_generation: PositiveInt | None = None  # of the store whose slab it has mapped and read
    slab_failure: Reason | None = None  # why it cannot
    compute: Compute | None = None  # of an engine
    kv_transfer: KvTransfer | None = None  # None: it computes its prompts itself, and hands none over
    stores_responses: bool = False  # a response that is to be stored can be asked for again
    kv_cache_tokens: PositiveInt | None = None  # that its KV cache holds
    load: ServingLoad | None = None  # None: not announced
    model_version: Name | None = None  # its operator's label; distinguishes versions of a model
    host: Name | None = None  # the machine; people read it. Instances of one `store` are near each other
    fabric: FabricEndpoint | None = None  # of a fabric agent
    fabric_load: FabricLoad | None = None  # None: not announced
    release: Name | None = None  # of Triptych, that the instance runs


class ItemTransfer(Message):
    item_index: NonNegativeInt
    mm_hash: MmHashText
    modality: Modality
    num_embeds: PositiveInt
    record: ItemRecord | None = None  # for the renderer alone; the engine gets the item without it
    pieces: tuple[PositiveInt, ...] = Field(default=(), max_length=MAX_PIECES)  # the record's, for the engine


class ECTransferParams(Message):
    """Gateway -> prefill_decode (HTTP, request field `ec_transfer_params`): the request's items."""

    request_id: Name
    gateway: Name
    traceparent: str | None = None
    remaining_ms: PositiveInt
    flow: Flow = ""  # prompts of one flow share its turns, as the jobs of its items do
    items: tuple[ItemTransfer, ...]

    def without_records(self) -> "ECTransferParams":
        """Return a copy for the engine, with the pieces instead of each record."""
        items = tuple(
            item.model_copy(update={"record": None, "pieces": item.record.pieces if item.record else ()})
            for item in self.items
        )
        return self.model_copy(update={"items": items})
