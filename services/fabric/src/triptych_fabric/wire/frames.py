"""Frames between two agents, once the handshake is done. Pure.

    byte    0      1        2..3       4..7           8..15               16..
            kind   0        0          body's bytes   number of the offer body

Big endian. The sender numbers its offers 1, 2, 3 … on a connection; every other frame names one of them,
except `KEEPALIVE`, whose number is 0. Bodies of `OFFER` and `FAILED` are JSON, of `CHUNK` bytes of the entry
in order, of `END` its checksum; all others have none. A kind bounds its body, so that a header is refused
before anything is allocated.

    sender                          receiver
      OFFER ────────────────────────▶          what it is
            ◀──────── ACCEPTED, PRESENT or FAILED
      CHUNK … CHUNK, END ───────────▶          once it is sealed, and accepted
            ◀────────────────── STORED or FAILED
      CANCEL ───────────────────────▶          instead of the rest; unanswered

With NIXL the bytes go past the connection, and each chunk brings a notification of its own. The receiver
first sends NIXL's metadata of its region, `ACCEPTED` has the address; `END` and `CANCEL` have the number of
chunks written, and one of them follows each `ACCEPTED`, also after `FAILED`: then the receiver knows that no
more come.

            ◀─────────────────── REGION         once, number 0
            ◀───────── ACCEPTED{address}
      WRITING ──────────────────────▶          the first chunk is about to come
      END{checksum, chunks} or CANCEL{chunks} ▶
"""

import struct
from enum import IntEnum
from typing import Annotated, NamedTuple, TypeVar

from pydantic import Field, ValidationError

from triptych_common.domain.errors import MalformedMessageError, TriptychError
from triptych_common.protocol.ids import MmHashText
from triptych_common.protocol.messages import EncodeClass, Message
from triptych_common.protocol.store import TensorSpec
from triptych_common.protocol.transfers import TransferFailureKind

FABRIC_VERSION = 2
MAX_CHUNK_BYTES = 1 << 20
MAX_BODY_BYTES = 4 << 10
MAX_REGION_BYTES = 64 << 10  # NIXL's metadata of one region: some hundred for each network
MAX_LIVE_OFFERS = 1024  # of a connection
MAX_OFFER_MS = 3_600_000
MAX_DETAIL_CHARS = 300
DIGEST_BYTES = 16

_HEADER = struct.Struct(">BBHIQ")
HEADER_BYTES = _HEADER.size
ADDRESS = struct.Struct(">Q")
"""Body of `ACCEPTED` with NIXL."""
COUNT = struct.Struct(">I")
"""Body of `CANCEL` with NIXL, and the end of the body of `END`: chunks written."""
NOTE = struct.Struct(">QI")
"""Notification of a chunk that NIXL wrote: offer number, bytes."""


class FrameKind(IntEnum):
    KEEPALIVE = 0
    OFFER = 1
    CHUNK = 2
    END = 3
    CANCEL = 4
    ACCEPTED = 5
    PRESENT = 6
    STORED = 7
    FAILED = 8
    REGION = 9
    WRITING = 10


BODY_BOUNDS: dict[FrameKind, tuple[int, int]] = {
    FrameKind.KEEPALIVE: (0, 0),
    FrameKind.OFFER: (2, MAX_BODY_BYTES),
    FrameKind.CHUNK: (1, MAX_CHUNK_BYTES),
    FrameKind.END: (DIGEST_BYTES, DIGEST_BYTES + COUNT.size),
    FrameKind.CANCEL: (0, COUNT.size),
    FrameKind.ACCEPTED: (0, ADDRESS.size),
    FrameKind.PRESENT: (0, 0),
    FrameKind.STORED: (0, 0),
    FrameKind.FAILED: (2, MAX_BODY_BYTES),
    FrameKind.REGION: (1, MAX_REGION_BYTES),
    FrameKind.WRITING: (0, 0),
}
"""Minimum and maximum size of each frame's body, in bytes."""

FROM_SENDER = frozenset(
    {FrameKind.KEEPALIVE, FrameKind.OFFER, FrameKind.CHUNK, FrameKind.END, FrameKind.CANCEL}
)
FROM_RECEIVER = frozenset(
    {FrameKind.KEEPALIVE, FrameKind.ACCEPTED, FrameKind.PRESENT, FrameKind.STORED, FrameKind.FAILED}
)
FROM_SENDER_OF_NIXL = FROM_SENDER - {FrameKind.CHUNK} | {FrameKind.WRITING}
FROM_RECEIVER_OF_NIXL = FROM_RECEIVER | {FrameKind.REGION}
_WITHOUT_NUMBER = (FrameKind.KEEPALIVE, FrameKind.REGION)


class FrameHeader(NamedTuple):
    kind: FrameKind
    number: int
    body_num_bytes: int


class Offer(Message):
    """Sender -> receiver: an entry to be stored there."""

    mm_hash: MmHashText
    spec: TensorSpec
    is_sealed: bool  # at the sender; otherwise its bytes come when it is sealed
    encode_class: EncodeClass
    remaining_ms: Annotated[int, Field(gt=0, le=MAX_OFFER_MS)]
    traceparent: Annotated[str, Field(max_length=100)] | None = None


class OfferFailed(Message):
    """Receiver -> sender: this offer will not store the entry."""

    kind: TransferFailureKind
    detail: Annotated[str, Field(max_length=MAX_DETAIL_CHARS)] = ""


class EntryFailedError(TriptychError):
    """The entry cannot be transferred; `kind` and `detail` are sent to the other side."""

    def __init__(self, kind: TransferFailureKind, detail: str) -> None:
        super().__init__(f"{kind.value}: {detail}")
        self.kind = kind
        self.detail = detail


Body = TypeVar("Body", bound=Message)
NOTHING = memoryview(b"")
Frame = tuple[bytes, memoryview, float]
"""Frame's head, chunk after it, and if both are empty the seconds until there may be another."""


def frame_header(kind: FrameKind, number: int, body_num_bytes: int) -> bytes:
    return _HEADER.pack(kind, 0, 0, body_num_bytes, number)


def short_frame(kind: FrameKind, number: int = 0, body: bytes = b"") -> bytes:
    return frame_header(kind, number, len(body)) + body


def json_frame(kind: FrameKind, number: int, message: Message) -> bytes:
    return short_frame(kind, number, message.model_dump_json().encode())


def read_header(data: bytes | bytearray | memoryview, allowed: frozenset[FrameKind]) -> FrameHeader:
    """Header in the first `HEADER_BYTES` of `data`.

    Raises:
        MalformedMessageError: no such frame may come from that side.
    """
    kind_value, zero, zeros, body_num_bytes, number = _HEADER.unpack_from(data)
    try:
        kind = FrameKind(kind_value)
    except ValueError:
        raise MalformedMessageError(f"no frame is of kind {kind_value}") from None
    if kind not in allowed or zero or zeros:
        raise MalformedMessageError(f"a frame {kind.name} may not come from there, or not so")
    least, most = BODY_BOUNDS[kind]
    if not least <= body_num_bytes <= most:
        raise MalformedMessageError(f"a frame {kind.name} with a body of {body_num_bytes} bytes")
    if (number == 0) != (kind in _WITHOUT_NUMBER):
        raise MalformedMessageError(f"a frame {kind.name} with number {number}")
    return FrameHeader(kind, number, body_num_bytes)


def read_body(cls: type[Body], body: bytes) -> Body:
    """Message in a JSON body. Raises MalformedMessageError: it is none."""
    try:
        return cls.model_validate_json(body, strict=True)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False, include_context=False)
        shown = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in faults[:3])
        raise MalformedMessageError(f"{cls.TYPE}: {shown}") from error


def unpack(form: struct.Struct, body: bytes) -> tuple[int, ...]:
    """Numbers in a body, or in NIXL's notification; raises MalformedMessageError."""
    if len(body) != form.size:
        raise MalformedMessageError(f"a body of {len(body)} bytes where {form.size} are due")
    return form.unpack(body)
