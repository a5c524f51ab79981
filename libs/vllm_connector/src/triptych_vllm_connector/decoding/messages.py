"""Messages between a host and its decoding processes, one datagram of msgpack each.

The host sends a `Request` to the child and waits for one reply: the type that the request's docstring names,
or `Failed`. `Begin` carries two descriptors: a memfd with the item's bytes, and a memfd for decoded bytes,
which the child enlarges and writes from its start.
"""

from typing import Literal, TypeVar

import msgspec

MAX_BYTES = 128 << 10  # of a message; Linux takes datagrams of up to 208 KiB by default
MAX_GRABBED = 4096  # frames of a request
MAX_CHUNKS = 1024  # of one reply

AudioType = Literal["float32", "float64", "int64", "int32", "int16", "uint8"]


class Request(msgspec.Struct, frozen=True, tag=True):
    """Host -> child."""


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Child -> host."""


ReplyType = TypeVar("ReplyType", bound=Reply)


# ---- an item -------------------------------------------------------------------------------------
class Begin(Request, frozen=True):
    """Start an item, within `cpu_s` seconds of CPU time. Reply: `Done`."""

    cpu_s: int


class End(Request, frozen=True):
    """Forget the item. Reply: `Ended`."""


class Done(Reply, frozen=True):
    """The request was carried out; the first one: the child is ready."""


class Ended(Reply, frozen=True):
    """The item's memory is free again."""

    num_bytes: int  # of private memory beyond what the child had at its start


class Failed(Reply, frozen=True):
    """The request could not be carried out."""

    why: Literal["media", "memory", "machine"]
    detail: str  # for logs: it may quote a library
    code: int = 0  # libsndfile's


# ---- streams of a video or an audio file ------------------------------------------------------------
class ListStreams(Request, frozen=True):
    """Read the file's headers by FFmpeg's demuxer `container`, no frame. Reply: `Streams`."""

    container: str
    kind: Literal["video", "audio"]


class Streams(Reply, frozen=True):
    """FFmpeg's codec names of the file's streams of that kind; "": FFmpeg knows none."""

    codecs: tuple[str, ...]
    num_pixels: int  # of the largest frame, as the headers say


# ---- videos: OpenCV's `VideoCapture` ------------------------------------------------------------
class OpenCapture(Request, frozen=True):
    """Open the video in OpenCV; `max_threads`: that FFmpeg decodes with. Reply: `Done`."""

    max_threads: int


class GetProperty(Request, frozen=True):
    """Reply: `Number`."""

    name: int


class Number(Reply, frozen=True):
    value: float


class SetProperty(Request, frozen=True):
    """Reply: `Flag`."""

    name: int
    value: float


class Flag(Reply, frozen=True):
    value: bool


class Grab(Request, frozen=True):
    """Decode the next `count` frames, of which the last may be retrieved. Reply: `Grabbed`."""

    count: int


class Grabbed(Reply, frozen=True):
    are_good: bytes  # 1 or 0 for each


class Retrieve(Request, frozen=True):
    """Write the frame that was grabbed last. Reply: `Frame`."""


class Frame(Reply, frozen=True):
    """Height × width × 3 bytes, BGR; 0 × 0: the frame cannot be retrieved."""

    height: int
    width: int


# ---- audio: libsndfile's `SoundFile`, and a container of PyAV --------------------------------------
class OpenSound(Request, frozen=True):
    """Open the file in libsndfile. Reply: `Sound`."""


class Sound(Reply, frozen=True):
    sample_rate: int
    num_frames: int
    num_channels: int


class ReadSound(Request, frozen=True):
    """Decode all samples. Reply: `Samples`."""


class Samples(Reply, frozen=True):
    """Samples as float32: [num_frames], or [num_frames, num_channels] of several channels."""

    num_frames: int
    num_channels: int


class OpenAudio(Request, frozen=True):
    """Open the file in PyAV by FFmpeg's demuxer `container`. Reply: `AudioStream`."""

    container: str


class AudioStream(Reply, frozen=True):
    """What PyAV says of the first audio stream; rate 0: the file has none."""

    rate: int
    duration: int | None
    time_base: tuple[int, int] | None
    container_duration: int | None


class DecodeAudio(Request, frozen=True):
    """Decode further frames. Reply: `Chunks`."""


class Chunk(msgspec.Struct, frozen=True):
    """One frame, [num_rows, num_columns] of `kind`, behind the one before."""

    num_rows: int
    num_columns: int
    kind: AudioType


class Chunks(Reply, frozen=True):
    """Frames in the order of the stream; none: it has ended."""

    chunks: tuple[Chunk, ...]


# ---- images: Pillow --------------------------------------------------------------------------
class LoadImage(Request, frozen=True):
    """Decode the image by Pillow's decoder of `format`, if it has that size. Reply: `Pixels`."""

    format: str
    width: int
    height: int


class Pixels(Reply, frozen=True):
    """An upright image of Pillow's `mode`: `num_bytes` bytes as `Image.tobytes` makes them."""

    mode: str
    width: int
    height: int
    num_bytes: int
    palette_mode: str
    palette: bytes
    transparency: int | bytes | tuple[int, ...] | None


AnyRequest = (
    Begin
    | End
    | ListStreams
    | OpenCapture
    | GetProperty
    | SetProperty
    | Grab
    | Retrieve
    | OpenSound
    | ReadSound
    | OpenAudio
    | DecodeAudio
    | LoadImage
)
AnyReply = (
    Done
    | Ended
    | Failed
    | Streams
    | Number
    | Flag
    | Grabbed
    | Frame
    | Sound
    | Samples
    | AudioStream
    | Chunks
    | Pixels
)
ENCODER = msgspec.msgpack.Encoder()
REQUESTS = msgspec.msgpack.Decoder(AnyRequest)
REPLIES = msgspec.msgpack.Decoder(AnyReply)
