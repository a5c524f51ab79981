"""Messages between a host and its decoding processes, one datagram of msgpack each.

The host sends a `DecodeRequest` to the child and waits for one reply: the type that the request's docstring
names, or `Failed`. `Begin` carries two descriptors: a memfd with the item's bytes, and a memfd for decoded
bytes, which the child enlarges and writes from its start.
"""

from typing import Literal, TypeVar, Union

import msgspec

MAX_BYTES = 128 << 10  # of a message; Linux takes datagrams of up to 208 KiB by default
MAX_GRABBED = 4096  # frames of a request
MAX_CHUNKS = 1024  # of one reply

AudioType = Literal["float32", "float64", "int64", "int32", "int16", "uint8"]


class DecodeRequest(msgspec.Struct, frozen=True, tag=True):
    """Host -> child: base class of requests."""


class DecodeReply(msgspec.Struct, frozen=True, tag=True):
    """Child -> host: base class of replies."""


ReplyType = TypeVar("ReplyType", bound=DecodeReply)


# ---- an item -------------------------------------------------------------------------------------
class Begin(DecodeRequest, frozen=True):
    """Start an item, within `cpu_s` seconds of CPU time. DecodeReply: `Acknowledged`."""

    cpu_s: int


class End(DecodeRequest, frozen=True):
    """Forget the item. DecodeReply: `Ended`."""


class Acknowledged(DecodeReply, frozen=True):
    """The request was carried out; the first one: the child is ready."""


class Ended(DecodeReply, frozen=True):
    """The item's memory is free again."""

    num_bytes: int  # of private memory beyond what the child had at its start


class Failed(DecodeReply, frozen=True):
    """The request could not be carried out."""

    why: Literal["media", "memory", "machine"]
    detail: str  # for logs: it may quote a library
    code: int = 0  # libsndfile's


# ---- streams of a video or an audio file ------------------------------------------------------------
class ListStreams(DecodeRequest, frozen=True):
    """Read the file's headers by FFmpeg's demuxer `container`, no frame. DecodeReply: `Streams`."""

    container: str
    kind: Literal["video", "audio"]


class Streams(DecodeReply, frozen=True):
    """FFmpeg's codec names of the file's streams of that kind; "": FFmpeg knows none."""

    codecs: tuple[str, ...]
    num_pixels: int  # of the largest frame, as the headers say


# ---- videos: OpenCV's `VideoCapture` ------------------------------------------------------------
class OpenCapture(DecodeRequest, frozen=True):
    """Open the video in OpenCV; `max_threads`: that FFmpeg decodes with. DecodeReply: `Acknowledged`."""

    max_threads: int


class CountFrames(DecodeRequest, frozen=True):
    """Count the frames by the demuxer, which decodes none, up to `max_count`. DecodeReply: `Number`."""

    max_count: int


class GetProperty(DecodeRequest, frozen=True):
    """Read a property of the capture. DecodeReply: `Number`."""

    name: int


class Number(DecodeReply, frozen=True):
    value: float


class SetProperty(DecodeRequest, frozen=True):
    """Set a property of the capture. DecodeReply: `Flag`."""

    name: int
    value: float


class Flag(DecodeReply, frozen=True):
    value: bool


class Grab(DecodeRequest, frozen=True):
    """Decode the next `count` frames, of which the last may be retrieved. DecodeReply: `Grabbed`."""

    count: int


class Grabbed(DecodeReply, frozen=True):
    are_good: bytes  # 1 or 0 for each


class Retrieve(DecodeRequest, frozen=True):
    """Write the frame that was grabbed last. DecodeReply: `Frame`."""


class Frame(DecodeReply, frozen=True):
    """Height × width × 3 bytes, BGR; 0 × 0: the frame cannot be retrieved."""

    height: int
    width: int


# ---- audio: libsndfile's `SoundFile`, and a container of PyAV --------------------------------------
class OpenSound(DecodeRequest, frozen=True):
    """Open the file in libsndfile. DecodeReply: `Sound`."""


class Sound(DecodeReply, frozen=True):
    sample_rate: int
    num_frames: int
    num_channels: int


class ReadSound(DecodeRequest, frozen=True):
    """Decode all samples. DecodeReply: `Samples`."""


class Samples(DecodeReply, frozen=True):
    """Samples as float32: [num_frames], or [num_frames, num_channels] of several channels."""

    num_frames: int
    num_channels: int


class OpenAudio(DecodeRequest, frozen=True):
    """Open the file in PyAV by FFmpeg's demuxer `container`. DecodeReply: `AudioStream`."""

    container: str


class AudioStream(DecodeReply, frozen=True):
    """Facts of the first audio stream, by PyAV; a rate of 0 means that the file has none."""

    rate: int
    duration: int | None
    time_base: tuple[int, int] | None
    container_duration: int | None


class DecodeAudio(DecodeRequest, frozen=True):
    """Decode further frames. DecodeReply: `Chunks`."""


class Chunk(msgspec.Struct, frozen=True):
    """One frame, [num_rows, num_columns] of `kind`, behind the one before."""

    num_rows: int
    num_columns: int
    kind: AudioType


class Chunks(DecodeReply, frozen=True):
    """Frames in the order of the stream; none: it has ended."""

    chunks: tuple[Chunk, ...]


# ---- images: Pillow --------------------------------------------------------------------------
class LoadImage(DecodeRequest, frozen=True):
    """Decode the image by Pillow's decoder of `format`, if it has that size. DecodeReply: `Pixels`."""

    format: str
    width: int
    height: int


class Pixels(DecodeReply, frozen=True):
    """An upright image of Pillow's `mode`: `num_bytes` bytes as `Image.tobytes` makes them."""

    mode: str
    width: int
    height: int
    num_bytes: int
    palette_mode: str
    palette: bytes
    transparency: int | bytes | tuple[int, ...] | None


ENCODER = msgspec.msgpack.Encoder()
REQUESTS: msgspec.msgpack.Decoder[DecodeRequest] = msgspec.msgpack.Decoder(
    Union[tuple(DecodeRequest.__subclasses__())]  # noqa: UP007
)
REPLIES: msgspec.msgpack.Decoder[DecodeReply] = msgspec.msgpack.Decoder(
    Union[tuple(DecodeReply.__subclasses__())]  # noqa: UP007
)
