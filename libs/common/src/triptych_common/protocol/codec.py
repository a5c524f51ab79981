"""Encode and decode entries of Redis Streams, registry records, and frames on the store's socket.

A stream entry has the fields

    v       schema version, decimal
    type    name of the message class
    body    the message as JSON
    tp      W3C traceparent                            (optional)
    ttl_ms  milliseconds left until the deadline       (optional)
    blob    bytes that go with the message, e.g. media (optional)
    spare_after_ms  of a job: when encoders of other stores may take it; without it, never (optional)

A frame on the socket is the length of its body as 4 bytes, big endian, then the body as JSON.
Everything is validated strictly when it is read: no coercion. Unknown fields are ignored: a later
release may have added them.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from triptych_common.protocol.errors import MalformedMessageError, UnsupportedVersionError
from triptych_common.protocol.messages import (
    SCHEMA_VERSION,
    EncodeCompleted,
    EncodeFailed,
    EncodeJob,
    EncodeNeeded,
    EncoderCacheMetadata,
    InstanceRecord,
    ItemAck,
    Message,
    Preallocation,
)
from triptych_common.protocol.store import MAX_FRAME_BYTES, StoreCommand, StoreFrame, StoreReply
from triptych_common.protocol.transfers import TRANSFER_MESSAGES

BUS_MESSAGES: tuple[type[Message], ...] = (
    EncodeJob,
    EncoderCacheMetadata,
    EncodeCompleted,
    EncodeFailed,
    Preallocation,
    ItemAck,
    EncodeNeeded,
    *TRANSFER_MESSAGES,
)

FRAME_HEADER_BYTES = 4

_BY_TYPE: dict[str, type[Message]] = {cls.TYPE: cls for cls in BUS_MESSAGES}
_VERSION = str(SCHEMA_VERSION).encode()
_COMMAND: TypeAdapter[StoreCommand] = TypeAdapter(StoreCommand)
_REPLY: TypeAdapter[StoreReply] = TypeAdapter(StoreReply)


@dataclass(frozen=True)
class Envelope:
    message: Message
    traceparent: str | None = None
    remaining_ms: int | None = None  # time that the sender had left when it sent
    blob: bytes | None = field(default=None, repr=False)
    received_at: float = field(default_factory=time.monotonic)  # seconds, this process's monotonic clock
    queued_s: float = 0.0  # wait of the entry in its stream, by Redis' clock; 0 if unknown

    @property
    def deadline(self) -> float | None:
        """Monotonic second after which no requester waits, or None."""
        if self.remaining_ms is None:
            return None
        return self.received_at - self.queued_s + self.remaining_ms / 1000


def encode(
    message: Message,
    *,
    traceparent: str | None = None,
    remaining_ms: int | None = None,
    blob: bytes | None = None,
    spare_after_ms: int | None = None,
) -> dict[bytes, bytes]:
    """Return the fields of the stream entry for `message`.

    `spare_after_ms`: consumers of other stores may take the entry after this wait; None: never.

    Raises:
        TypeError: not a message of the bus.
    """
    if message.TYPE not in _BY_TYPE:
        raise TypeError(f"{message.TYPE} does not travel on the bus")
    fields = {b"v": _VERSION, b"type": message.TYPE.encode(), b"body": _body(message)}
    if traceparent is not None:
        fields[b"tp"] = traceparent.encode()
    if remaining_ms is not None:
        fields[b"ttl_ms"] = str(remaining_ms).encode()
    if blob is not None:
        fields[b"blob"] = blob
    if spare_after_ms is not None:
        fields[b"spare_after_ms"] = str(spare_after_ms).encode()
    return fields


def decode(fields: Mapping[bytes, bytes], *, queued_s: float = 0.0) -> Envelope:
    """Return the message in a stream entry.

    Raises:
        UnsupportedVersionError: of another schema version.
        MalformedMessageError: anything else is wrong.
    """
    _check_version(_required(fields, b"v"))
    name = _text(fields, b"type")
    cls = _BY_TYPE.get(name)
    if cls is None:
        raise MalformedMessageError(f"unknown message type {name[:100]!r}")
    try:
        message = cls.model_validate_json(_required(fields, b"body"), strict=True)
    except ValidationError as error:
        raise MalformedMessageError(_explain(name, error)) from error
    return Envelope(
        message=message,
        traceparent=_text(fields, b"tp") if b"tp" in fields else None,
        remaining_ms=_decimal(fields, b"ttl_ms") if b"ttl_ms" in fields else None,
        blob=fields.get(b"blob"),
        queued_s=queued_s,
    )


def encode_record(record: InstanceRecord) -> bytes:
    """Encode one registry record, with its schema version."""
    return orjson.dumps({"v": SCHEMA_VERSION, "record": record.model_dump(mode="json")})


def decode_record(value: bytes) -> InstanceRecord:
    """Decode what `encode_record` encoded.

    Raises:
        UnsupportedVersionError: of another schema version.
        MalformedMessageError: anything else is wrong.
    """
    try:
        outer = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise MalformedMessageError(f"InstanceRecord: {error}") from error
    if not isinstance(outer, dict) or not outer.keys() >= {"v", "record"}:
        raise MalformedMessageError("InstanceRecord: want the keys v and record")
    _check_version(str(outer["v"]).encode())
    try:
        return InstanceRecord.model_validate_json(orjson.dumps(outer["record"]), strict=True)
    except ValidationError as error:
        raise MalformedMessageError(_explain("InstanceRecord", error)) from error


# ---- frames on the store's socket ----------------------------------------------------------------
def frame(message: StoreFrame, seq: int | None = None) -> bytes:
    """Return `message` as one frame, with `seq` in place of its own if given.

    Raises:
        MalformedMessageError: larger than `MAX_FRAME_BYTES`.
    """
    fields = message.model_dump(mode="json")
    if seq is not None:
        fields["seq"] = seq
    body = orjson.dumps(fields)
    if len(body) > MAX_FRAME_BYTES:
        raise MalformedMessageError(f"frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return len(body).to_bytes(FRAME_HEADER_BYTES, "big") + body


class FrameDecoder:
    """Split a byte stream into frame bodies. One per connection; holds at most one unfinished frame."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that `data` completes, in order.

        Raises:
            MalformedMessageError: a frame announces more than the limit. The stream cannot be read on.
        """
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= FRAME_HEADER_BYTES:
            num_bytes = int.from_bytes(self._buffer[start : start + FRAME_HEADER_BYTES], "big")
            if num_bytes > self._max_frame_bytes:
                raise MalformedMessageError(f"frame of {num_bytes} bytes exceeds {self._max_frame_bytes}")
            end = start + FRAME_HEADER_BYTES + num_bytes
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + FRAME_HEADER_BYTES : end]))
            start = end
        del self._buffer[:start]
        return bodies


def decode_command(body: bytes) -> StoreCommand:
    """Return the command in a frame's body. Raises MalformedMessageError: not a command."""
    try:
        return _COMMAND.validate_json(body, strict=True)
    except ValidationError as error:
        raise MalformedMessageError(_explain("store command", error)) from error


def decode_reply(body: bytes) -> StoreReply:
    """Return the reply or push in a frame's body. Raises MalformedMessageError: not a reply."""
    try:
        return _REPLY.validate_json(body, strict=True)
    except ValidationError as error:
        raise MalformedMessageError(_explain("store reply", error)) from error


# ---- helpers -------------------------------------------------------------------------------------
def _body(message: Message) -> bytes:
    return orjson.dumps(message.model_dump(mode="json"))


def _check_version(version: bytes) -> None:
    if version != _VERSION:
        raise UnsupportedVersionError(version[:20].decode(errors="replace"), SCHEMA_VERSION)


def _required(fields: Mapping[bytes, bytes], name: bytes) -> bytes:
    try:
        return fields[name]
    except KeyError:
        raise MalformedMessageError(f"field {name.decode()} is missing") from None


def _text(fields: Mapping[bytes, bytes], name: bytes) -> str:
    try:
        return _required(fields, name).decode()
    except UnicodeDecodeError:
        raise MalformedMessageError(f"field {name.decode()} is not UTF-8") from None


def _decimal(fields: Mapping[bytes, bytes], name: bytes) -> int:
    text = _text(fields, name)
    if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 16):
        raise MalformedMessageError(f"field {name.decode()} is not a whole number")
    return int(text)


def _explain(what: str, error: ValidationError) -> str:
    """Describe each fault in one line, without the faulty values, which may be large or private."""
    faults: list[Any] = error.errors(include_url=False, include_input=False, include_context=False)
    shown = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in faults[:5])
    more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
    return f"{what}: {shown}{more}"
