"""Steps of the protocol, as data: which process sends what, from a caller's request to the last unpin.

The one list of everything that can be late, lost or doubled. Tests of faults go through it instead of
remembering, and docs/reference/protocol.md has it as a table. A step is one message in one
direction; the answers of the store to a command belong to the command's step.
"""

from dataclasses import dataclass
from enum import StrEnum

from triptych_common.protocol import store
from triptych_common.protocol.messages import (
    Decision,
    ECTransferParams,
    EncodeCompleted,
    EncodeFailed,
    EncodeJob,
    EncodeNeeded,
    EncoderCacheMetadata,
    InstanceRecord,
    ItemAck,
    Message,
    Outcome,
    Preallocation,
)
from triptych_common.protocol.transfers import TransferCompleted, TransferFailed, TransferOrder


class Party(StrEnum):
    """A process that takes part. An engine is two parties: its scheduler, and the worker with the tensors."""

    CLIENT = "client"
    GATEWAY = "gateway"
    ENCODER = "encoder"
    ENCODER_WORKER = "encoder_worker"
    PREFILL_DECODE = "prefill_decode"
    PREFILL_DECODE_WORKER = "prefill_decode_worker"
    PREFILL = "prefill"  # an instance that only prefills: towards encoders and store a `prefill_decode`
    DECODE = "decode"  # an instance that only decodes
    CACHE_STORE = "cache_store"
    SOURCE_AGENT = "source_agent"  # the fabric agent beside the store that has an entry
    TARGET_AGENT = "target_agent"  # the one beside the store that is to have it
    OPERATOR = "operator"  # a person's command line
    REGISTRY = "registry"  # keys in Redis


class Channel(StrEnum):
    STREAM = "stream"  # a Redis Stream: durable, at least once
    KEY = "key"  # a Redis key
    STORE = "store"  # the store's socket, from a client
    PUSH = "push"  # the store's socket, to a client
    HTTP = "http"
    FABRIC = "fabric"  # a connection between two fabric agents


class Occurs(StrEnum):
    ALWAYS = "always"  # for every item that is new and meets no fault
    SOMETIMES = "sometimes"  # when a request ends early, an item is not needed, or something went wrong
    APART = "apart"  # belongs to no request: sessions, heartbeats, operators


@dataclass(frozen=True, slots=True)
class Step:
    """One message from `sender` to `receiver`. `message` None: bytes or HTTP without a type of ours."""

    name: str
    sender: Party
    receiver: Party
    channel: Channel
    message: type[Message] | None
    occurs: Occurs = Occurs.SOMETIMES
    stream: str | None = None  # attribute of `StreamNames`
    variant: Decision | Outcome | None = None  # where one type means several things
    replies: tuple[type[Message], ...] = ()  # of the store, besides `StoreFailure`


def _bus(
    name: str,
    sender: Party,
    receiver: Party,
    stream: str,
    message: type[Message],
    occurs: Occurs = Occurs.SOMETIMES,
    variant: Decision | Outcome | None = None,
) -> Step:
    return Step(name, sender, receiver, Channel.STREAM, message, occurs, stream, variant)


def _command(
    name: str,
    sender: Party,
    message: type[Message],
    *replies: type[Message],
    occurs: Occurs = Occurs.SOMETIMES,
) -> Step:
    return Step(name, sender, Party.CACHE_STORE, Channel.STORE, message, occurs, replies=replies)


def _push(name: str, receiver: Party, message: type[Message], occurs: Occurs = Occurs.SOMETIMES) -> Step:
    return Step(name, Party.CACHE_STORE, receiver, Channel.PUSH, message, occurs)


def _http(
    name: str,
    sender: Party,
    receiver: Party,
    message: type[Message] | None = None,
    occurs: Occurs = Occurs.SOMETIMES,
) -> Step:
    return Step(name, sender, receiver, Channel.HTTP, message, occurs)


_GATEWAY, _ENCODER, _WRITER = Party.GATEWAY, Party.ENCODER, Party.ENCODER_WORKER
_CONSUMER, _LOADER, _OPERATOR = Party.PREFILL_DECODE, Party.PREFILL_DECODE_WORKER, Party.OPERATOR
_ALWAYS, _APART = Occurs.ALWAYS, Occurs.APART
_PREFILL, _DECODE = Party.PREFILL, Party.DECODE
_SOURCE, _TARGET = Party.SOURCE_AGENT, Party.TARGET_AGENT

STEPS: tuple[Step, ...] = (
    # ---- a new item, in the order of things ----
    _http("request", Party.CLIENT, _GATEWAY, occurs=_ALWAYS),
    _bus("job", _GATEWAY, _ENCODER, "encode_jobs", EncodeJob, _ALWAYS),
    _http("fetch_media", _ENCODER, _GATEWAY),
    _command("reserve", _ENCODER, store.Reserve, store.Reserved, store.AlreadySealed, occurs=_ALWAYS),
    _command("watch_seal", _ENCODER, store.PinOrWatch, store.Watching, store.Pinned, occurs=_ALWAYS),
    _bus("metadata_to_consumer", _ENCODER, _CONSUMER, "metadata", EncoderCacheMetadata, _ALWAYS),
    _bus("metadata_to_gateway", _ENCODER, _GATEWAY, "encode_results", EncoderCacheMetadata, _ALWAYS),
    _http("dispatch", _GATEWAY, _CONSUMER, ECTransferParams, _ALWAYS),
    _bus("grant", _CONSUMER, _ENCODER, "preallocations", Preallocation, _ALWAYS, Decision.GRANTED),
    _command("pin_or_watch", _CONSUMER, store.PinOrWatch, store.Watching, store.Pinned, occurs=_ALWAYS),
    _command("seal", _WRITER, store.Seal, store.Done, occurs=_ALWAYS),
    _push("sealed_to_encoder", _ENCODER, store.EntrySealed, _ALWAYS),
    _push("sealed_to_consumer", _CONSUMER, store.EntrySealed, _ALWAYS),
    _bus("completed", _ENCODER, _GATEWAY, "encode_results", EncodeCompleted, _ALWAYS),
    _http("first_token", _CONSUMER, _GATEWAY, occurs=_ALWAYS),
    _bus("ack_injected", _CONSUMER, _ENCODER, "acks", ItemAck, _ALWAYS, Outcome.INJECTED),
    _command("unpin_view", _LOADER, store.Unpin, store.Done, occurs=_ALWAYS),
    _command("unpin_producer", _ENCODER, store.Unpin, store.Done, occurs=_ALWAYS),
    _http("answer", _GATEWAY, Party.CLIENT, occurs=_ALWAYS),
    # ---- not needed, not possible, or once more ----
    _bus("decline", _CONSUMER, _ENCODER, "preallocations", Preallocation, variant=Decision.DECLINED),
    _bus("ack_skipped", _CONSUMER, _ENCODER, "acks", ItemAck, variant=Outcome.SKIPPED),
    _bus("ack_elsewhere", _GATEWAY, _ENCODER, "acks", ItemAck, variant=Outcome.SKIPPED),
    _bus("ack_failed", _CONSUMER, _ENCODER, "acks", ItemAck, variant=Outcome.FAILED),
    _bus("encode_failed", _ENCODER, _GATEWAY, "encode_results", EncodeFailed),
    _bus("encode_needed", _CONSUMER, _GATEWAY, "encode_results", EncodeNeeded),
    _push("writer_lost_to_encoder", _ENCODER, store.WriterLost),
    _push("writer_lost_to_consumer", _CONSUMER, store.WriterLost),
    _command("cancel", _ENCODER, store.Cancel, store.Done),
    _command("cancel_unfit", _WRITER, store.Cancel, store.Done),
    _command("unwatch_seal", _ENCODER, store.Unwatch, store.Done),
    _command("unwatch", _CONSUMER, store.Unwatch, store.Done),
    _command("unpin", _CONSUMER, store.Unpin, store.Done),
    _command("evict_unreadable", _CONSUMER, store.Evict, store.Done),
    _http("disconnect", Party.CLIENT, _GATEWAY),
    _http("abort", _GATEWAY, _CONSUMER),
    # ---- in two stages: in the place of `dispatch` and `first_token` ----
    _http("prefill", _GATEWAY, _PREFILL, ECTransferParams),
    _http("prefilled", _PREFILL, _GATEWAY),
    _http("decode", _GATEWAY, _DECODE, ECTransferParams),
    _http("first_decoded", _DECODE, _GATEWAY),
    _http("abort_prefill", _GATEWAY, _PREFILL),
    _http("abort_decode", _GATEWAY, _DECODE),
    # ---- between hosts: the consumer's store gets the entry from the encoder's ----
    _bus("order_transfer", _GATEWAY, _SOURCE, "transfers", TransferOrder),
    _command("watch_source", _SOURCE, store.PinOrWatch, store.Watching, store.Pinned),
    Step("offer", _SOURCE, _TARGET, Channel.FABRIC, None),
    _command("reserve_target", _TARGET, store.Reserve, store.Reserved, store.AlreadySealed),
    Step("accept", _TARGET, _SOURCE, Channel.FABRIC, None),
    _push("sealed_to_source", _SOURCE, store.EntrySealed),
    Step("bytes", _SOURCE, _TARGET, Channel.FABRIC, None),
    _command("seal_target", _TARGET, store.Seal, store.Done),
    Step("stored", _TARGET, _SOURCE, Channel.FABRIC, None),
    _command("unpin_source", _SOURCE, store.Unpin, store.Done),
    _bus("transfer_completed", _SOURCE, _GATEWAY, "encode_results", TransferCompleted),
    _bus("transfer_failed", _SOURCE, _GATEWAY, "encode_results", TransferFailed),
    _command("cancel_target", _TARGET, store.Cancel, store.Done),
    _command("unwatch_source", _SOURCE, store.Unwatch, store.Done),
    _push("writer_lost_to_source", _SOURCE, store.WriterLost),
    # ---- sessions, presence, operators ----
    _command("hello_encoder", _ENCODER, store.Hello, store.Welcome, occurs=_APART),
    _command("hello_encoder_worker", _WRITER, store.Hello, store.Welcome, occurs=_APART),
    _command("hello_consumer", _CONSUMER, store.Hello, store.Welcome, occurs=_APART),
    _command("hello_consumer_worker", _LOADER, store.Hello, store.Welcome, occurs=_APART),
    _command("ping", _OPERATOR, store.Ping, store.Done, occurs=_APART),
    _command("lookup", _OPERATOR, store.Lookup, store.Entries, occurs=_APART),
    _command("stats", _OPERATOR, store.StatsQuery, store.StoreStats, occurs=_APART),
    _command("list", _OPERATOR, store.ListEntries, store.Entries, occurs=_APART),
    _command("evict", _OPERATOR, store.Evict, store.Done, occurs=_APART),
    _command("verify", _OPERATOR, store.Verify, store.Verified, occurs=_APART),
    _command("metrics", _OPERATOR, store.MetricsQuery, store.StoreMetrics, occurs=_APART),
    _command("hello_agent", _SOURCE, store.Hello, store.Welcome, occurs=_APART),
    Step("heartbeat_agent", _SOURCE, Party.REGISTRY, Channel.KEY, InstanceRecord, _APART),
    Step("heartbeat_gateway", _GATEWAY, Party.REGISTRY, Channel.KEY, InstanceRecord, _APART),
    Step("heartbeat_encoder", _ENCODER, Party.REGISTRY, Channel.KEY, InstanceRecord, _APART),
    Step("heartbeat_consumer", _CONSUMER, Party.REGISTRY, Channel.KEY, InstanceRecord, _APART),
)


STAGE_STEPS = tuple(each for each in STEPS if {each.sender, each.receiver} & {_PREFILL, _DECODE})
"""Steps of requests that one instance prefills and another decodes. vLLM sends the KV cache itself."""

FABRIC_STEPS = tuple(each for each in STEPS if {each.sender, each.receiver} & {_SOURCE, _TARGET})
"""Steps of entries that go from one host's store to another's."""


def step(name: str) -> Step:
    """Return the step of that name.

    Raises:
        KeyError: there is none.
    """
    for each in STEPS:
        if each.name == name:
            return each
    raise KeyError(name)
