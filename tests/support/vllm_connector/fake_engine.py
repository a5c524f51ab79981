"""Stand-ins for what surrounds the consumer inside EngineCore: vLLM's requests, the store, the bus."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.message_samples import cache_metadata
from triptych_common.protocol.messages import (
    EncodeNeeded,
    EncoderCacheMetadata,
    ItemAck,
    Message,
    Preallocation,
    Requester,
)
from triptych_common.protocol.store import (
    Descriptor,
    EntrySealed,
    Pinned,
    StoreReply,
    TensorSpec,
    Watching,
    WriterLost,
)

INSTANCE = "pd-0"
ENCODER = "encoder-0"
GATEWAY = "gateway-0"


def mm_hash(name: str | int) -> str:
    """64 hex digits, recognisable."""
    return f"{name:0>64}" if isinstance(name, str) else f"{name:064x}"


@dataclass(frozen=True)
class FakePosition:
    """`PlaceholderRange`."""

    offset: int
    length: int
    num_embeds: int

    def get_num_embeds(self) -> int:
        return self.num_embeds

    def get_embeds_indices_in_range(self, start: int, end: int) -> tuple[int, int]:
        """Of the placeholder's tokens; its first and its last are marks."""
        first, last = (max(0, min(self.num_embeds, each - 1)) for each in (start, end))
        return first, last


@dataclass(frozen=True)
class FakeFeature:
    """`MultiModalFeatureSpec`."""

    identifier: str
    mm_position: FakePosition
    data: Mapping[str, object] | None = field(default_factory=lambda: {"image_grid_thw": (1, 2, 2)})
    modality: str = "image"
    mm_hash: str | None = None  # of the item, where this is a piece of one


@dataclass(eq=False)
class FakeRequest:
    """`vllm.v1.request.Request`, as far as our scheduler side reads it."""

    request_id: str
    mm_features: list[FakeFeature]
    ec_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None

    def get_num_encoder_embeds(self, input_id: int) -> int:
        return self.mm_features[input_id].mm_position.get_num_embeds()


def fake_request(
    engine_request_id: str,
    items: list[tuple[str, int]],
    *,
    request_id: str | None = None,
    gateway: str | None = GATEWAY,
    gap: int = 2,
) -> FakeRequest:
    """`items` are (mm_hash, rows); before each placeholder stand `gap` tokens of text, behind it 2 marks."""
    features, offset = [], 0
    for identifier, num_embeds in items:
        offset += gap
        features.append(FakeFeature(identifier, FakePosition(offset, num_embeds + 2, num_embeds)))
        offset += num_embeds + 2
    _ROWS.update(items)
    if gateway is None:  # straight to the HTTP port, without a gateway
        return FakeRequest(engine_request_id, features)
    params = {
        "request_id": request_id or f"wire-{engine_request_id}",
        "gateway": gateway,
        "traceparent": None,
        "remaining_ms": 1000,
        "items": [
            {"item_index": index, "mm_hash": identifier, "modality": "image", "num_embeds": num_embeds}
            for index, (identifier, num_embeds) in enumerate(items)
        ],
    }
    return FakeRequest(engine_request_id, features, params)


def whole_request(engine_request_id: str, items: list[tuple[str, int]], *, gap: int = 2) -> FakeRequest:
    """With its raw media, for an instance that has a tower."""
    request = fake_request(engine_request_id, items, gateway=None, gap=gap)
    media: dict[str, object] = {"pixel_values": b"", "image_grid_thw": (1, 2, 2)}
    request.mm_features = [replace(feature, data=media) for feature in request.mm_features]
    return request


_ROWS: dict[str, int] = {}  # what the fake encoders make: what the latest request for the item expects


def descriptor(identifier: str, num_embeds: int | None = None) -> Descriptor:
    num_embeds = num_embeds or _ROWS.get(identifier, 1)
    spec = TensorSpec(shape=(num_embeds, 4), dtype="float32", num_bytes=num_embeds * 16)
    return Descriptor(mm_hash=identifier, spec=spec, offset=0, generation=1)


def pinned(identifier: str, pin_id: int) -> Pinned:
    return Pinned(seq=1, pin_id=pin_id, descriptor=descriptor(identifier))


def sealed(identifier: str, pin_id: int) -> EntrySealed:
    return EntrySealed(seq=0, pin_id=pin_id, descriptor=descriptor(identifier))


def watching(identifier: str, *, writing: bool = True) -> Watching:
    return Watching(seq=1, mm_hash=identifier, writing=writing)


def writer_lost(identifier: str) -> WriterLost:
    return WriterLost(seq=0, mm_hash=identifier)


def metadata(
    identifier: str,
    *requesters: tuple[str, int],
    job_id: str = "job-1",
    encoder: str = ENCODER,
    prefill_decode: str = INSTANCE,
) -> EncoderCacheMetadata:
    """Of an item of one row, for these (wire id, item index)s."""
    for_these = (
        Requester(request_id=request_id, item_index=index, gateway=GATEWAY, prefill_decode=prefill_decode)
        for request_id, index in requesters
    )
    return cache_metadata(*for_these, job_id=job_id, mm_hash=identifier, encoder=encoder)


class FakeStoreSession:
    """`StoreSession`: keeps the commands, and what it was connected with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self.sent: list[tuple[Any, Future[StoreReply]]] = []
        self.is_closed = False

    def submit(self, command: Any) -> Future[StoreReply]:
        future: Future[StoreReply] = Future()
        self.sent.append((command, future))
        return future

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakePinLink:
    """`PinLink`: records its calls."""

    commands: list[tuple[str, str | int]] = field(default_factory=list)

    def pin_or_watch(self, mm_hash: str) -> None:
        self.commands.append(("pin_or_watch", mm_hash))

    def unpin(self, pin_id: int) -> None:
        self.commands.append(("unpin", pin_id))

    def unwatch(self, mm_hash: str) -> None:
        self.commands.append(("unwatch", mm_hash))

    def take(self) -> list[tuple[str, str | int]]:
        taken, self.commands = self.commands, []
        return taken


@dataclass
class FakeMessageSender:
    """`MessageSender`: records what was sent, and the receiver."""

    sent: list[tuple[str, Message]] = field(default_factory=list)

    def send_to_encoder(self, encoder: str, message: Message, traceparent: str | None) -> None:
        self.sent.append((encoder, message))

    def send_to_gateway(self, gateway: str, message: Message, traceparent: str | None) -> None:
        self.sent.append((gateway, message))

    def take(self) -> list[tuple[str, Message]]:
        taken, self.sent = self.sent, []
        return taken

    def take_short(self) -> list[str]:
        """What was sent since the last time, in short, e.g. `granted 0`, `injected 1`, `encode needed 0`."""
        return [_short(message) for _, message in self.take()]


def _short(message: Message) -> str:
    match message:
        case Preallocation():
            return f"{message.decision} {message.item_index}"
        case ItemAck():
            return f"{message.outcome} {message.item_index}"
        case EncodeNeeded():
            return f"encode needed {message.item_index}"
        case _:
            return message.TYPE
