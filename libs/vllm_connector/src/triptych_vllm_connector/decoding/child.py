"""A decoding process. Arguments: descriptors of its socket and lifeline, and its limits in bytes.

    ready ──Begin──▶ item ──requests──▶ … ──End──▶ ready ──the host's end of the socket closes──▶ exit

It ends with its host, also in the middle of a decoder's C code: the lifeline is the read end of a pipe whose
write end the host holds, and the kernel sends SIGIO when that closes.
"""

import contextlib
import ctypes
import math
import mmap
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import av
import cv2
import numpy as np
import soundfile
from PIL import AvifImagePlugin, Image

from triptych_common.domain.transient import is_transient
from triptych_vllm_connector.decoding import messages
from triptych_vllm_connector.decoding.images import info_of, upright
from triptych_vllm_connector.process_exit import end_with_peer

NO_DECODER = "none"  # matches no decoder's name: FFmpeg reads headers, and decodes nothing to complete them
CHUNK_BYTES = 4 << 20
NEAR_LIMIT = 0.8  # a failure at so much of the memory limit is taken for one of memory
_STATUS = Path("/proc/self/status")


class Memory:
    def __init__(self, num_bytes: int) -> None:
        """Limit it to `num_bytes` beyond what the process has now."""
        self._own_bytes = self._status("VmData")
        self._own_resident_bytes = self._status("VmRSS")
        self._limit = num_bytes
        limit = self._own_bytes + num_bytes
        # Not RLIMIT_AS: address space that threads reserve, and memory shared with the host, do not count.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    @staticmethod
    def _status(name: str) -> int:
        text = _STATUS.read_text()
        return int(text.partition(f"{name}:")[2].split()[0]) << 10

    @property
    def num_bytes(self) -> int:
        """Private memory beyond what the process had at its start."""
        return max(self._status("VmData") - self._own_bytes, 0)

    def forget_peak(self) -> None:
        with contextlib.suppress(OSError):  # a kernel without page monitoring
            Path("/proc/self/clear_refs").write_text("5")

    def was_near_limit(self) -> bool:
        return self._status("VmHWM") - self._own_resident_bytes > NEAR_LIMIT * self._limit

    def trim(self) -> None:
        """Give what the C library keeps for later back to the kernel."""
        with contextlib.suppress(AttributeError):  # glibc's
            ctypes.CDLL(None).malloc_trim(0)


class Output:
    """Memory that the host maps, too: decoded bytes from its start."""

    def __init__(self, file: int, max_bytes: int) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._map: mmap.mmap | None = None

    def array(self, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> Any:
        """Return an array in the memory. Earlier ones stay valid, and may overlap it."""
        num_bytes = offset + math.prod(shape) * np.dtype(dtype).itemsize
        if num_bytes > self._max_bytes:
            raise ValueError(f"{num_bytes} bytes of decoded media are too many")
        if self._map is None or len(self._map) < num_bytes:
            if os.fstat(self._file).st_size < num_bytes:
                os.ftruncate(self._file, max(num_bytes, 1))
            self._map = mmap.mmap(self._file, max(num_bytes, 1))
        return np.ndarray(shape, dtype, self._map, offset)


class OpenedItem:
    def __init__(self, media: int, output: Output) -> None:
        self._output = output
        self._opened = contextlib.ExitStack()
        self._path = f"/proc/self/fd/{media}"
        self._capture: Any = None
        self._frame: Any = None
        self._sound: Any = None
        self._chunks: Iterator[Any] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _file(self) -> Any:
        return self._opened.enter_context(Path(self._path).open("rb"))

    # ---- streams -----------------------------------------------------------------------------
    def list_streams(self, request: messages.ListStreams) -> messages.Streams:
        options = {"codec_whitelist": NO_DECODER}
        with av.open(self._file(), format=request.container, options=options) as container:
            contexts = [each.codec_context for each in container.streams if each.type == request.kind]
            codecs = tuple("" if each is None else str(each.codec.canonical_name) for each in contexts)
            sizes = (each.width * each.height for each in contexts if each is not None)
            num_pixels = max(sizes, default=0) if request.kind == "video" else 0
        return messages.Streams(codecs, num_pixels)

    # ---- videos ------------------------------------------------------------------------------
    def open_capture(self, request: messages.OpenCapture) -> messages.Acknowledged:
        params: list[int] = []
        if request.max_threads < min(cv2.getNumberOfCPUs(), 16):  # else OpenCV's own choice
            params = [cv2.CAP_PROP_N_THREADS, request.max_threads]
        if self._capture is not None:
            self._capture.release()
        # By path: from a Python buffer, OpenCV 5 ends the process for some files that are damaged.
        capture = cv2.VideoCapture(self._path, cv2.CAP_FFMPEG, params)
        self._opened.callback(capture.release)
        if not capture.isOpened():
            raise ValueError("the video cannot be opened")
        self._capture = capture
        return messages.Acknowledged()

    def count_frames(self, request: messages.CountFrames) -> messages.Number:
        capture = cv2.VideoCapture(self._path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_FORMAT, -1])  # as vLLM counts
        count = 0
        while count < request.max_count and capture.grab():
            count += 1
        capture.release()
        return messages.Number(float(count))

    def get_property(self, request: messages.GetProperty) -> messages.Number:
        return messages.Number(float(self._capture.get(request.name)))

    def set_property(self, request: messages.SetProperty) -> messages.Flag:
        return messages.Flag(bool(self._capture.set(request.name, request.value)))

    def grab(self, request: messages.Grab) -> messages.Grabbed:
        grab = self._capture.grab
        return messages.Grabbed(bytes([grab() for _ in range(min(request.count, messages.MAX_GRABBED))]))

    def retrieve(self, request: messages.Retrieve) -> messages.Frame:
        if self._frame is None:
            height = int(self._capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
            width = int(self._capture.get(cv2.CAP_PROP_FRAME_WIDTH))
            self._frame = self._output.array((height, width, 3), np.uint8)
        ok, frame = self._capture.retrieve(self._frame)
        if not ok or frame is None or frame.size == 0:
            return messages.Frame(0, 0)
        if frame.ctypes.data != self._frame.ctypes.data:  # turned, or of another size: OpenCV made a new one
            self._frame = self._output.array(frame.shape, frame.dtype)
            self._frame[...] = frame
        return messages.Frame(*frame.shape[:2])

    # ---- audio -------------------------------------------------------------------------------
    def open_sound(self, request: messages.OpenSound) -> messages.Sound:
        self._sound = self._opened.enter_context(soundfile.SoundFile(self._file()))
        return messages.Sound(self._sound.samplerate, self._sound.frames, self._sound.channels)

    def read_sound(self, request: messages.ReadSound) -> messages.Samples:
        num_frames, num_channels = self._sound.frames, self._sound.channels
        shape = (num_frames,) if num_channels == 1 else (num_frames, num_channels)
        samples = self._sound.read(out=self._output.array(shape, np.float32))
        return messages.Samples(len(samples), num_channels)

    def open_audio(self, request: messages.OpenAudio) -> messages.AudioStream:
        container = self._opened.enter_context(av.open(self._file(), format=request.container))
        if not container.streams.audio:
            return messages.AudioStream(0, None, None, container.duration)
        stream = container.streams.audio[0]
        stream.thread_type = "AUTO"  # as vLLM's reader sets it
        self._chunks = (frame.to_ndarray() for frame in container.decode(stream))
        base = stream.time_base
        return messages.AudioStream(
            stream.rate or 0,
            stream.duration,
            None if base is None else (base.numerator, base.denominator),
            container.duration,
        )

    def decode_audio(self, request: messages.DecodeAudio) -> messages.Chunks:
        chunks: list[messages.Chunk] = []
        end = 0
        for chunk in self._chunks:
            offset = -(-end // chunk.itemsize) * chunk.itemsize
            self._output.array(chunk.shape, chunk.dtype, offset)[...] = chunk
            end = offset + chunk.nbytes
            num_rows, num_columns = chunk.shape
            chunks.append(messages.Chunk(num_rows, num_columns, str(chunk.dtype)))  # type: ignore[arg-type]
            if end >= CHUNK_BYTES or len(chunks) == messages.MAX_CHUNKS:
                break
        return messages.Chunks(tuple(chunks))

    # ---- images ------------------------------------------------------------------------------
    def load_image(self, request: messages.LoadImage) -> messages.Pixels:
        with Image.open(self._file(), formats=(request.format,)) as opened:
            if opened.size != (request.width, request.height):
                raise ValueError("the image is not the one that the host saw")
            image = upright(opened)
            image.load()
            pixels = image.tobytes()
            self._output.array((len(pixels),), np.uint8)[...] = np.frombuffer(pixels, np.uint8)
            palette_mode, palette, transparency = info_of(image)
            return messages.Pixels(
                image.mode, *image.size, len(pixels), palette_mode, bytes(palette), transparency
            )


HANDLERS: dict[type[messages.DecodeRequest], Callable[[OpenedItem, Any], messages.DecodeReply]] = {
    messages.ListStreams: OpenedItem.list_streams,
    messages.OpenCapture: OpenedItem.open_capture,
    messages.CountFrames: OpenedItem.count_frames,
    messages.GetProperty: OpenedItem.get_property,
    messages.SetProperty: OpenedItem.set_property,
    messages.Grab: OpenedItem.grab,
    messages.Retrieve: OpenedItem.retrieve,
    messages.OpenSound: OpenedItem.open_sound,
    messages.ReadSound: OpenedItem.read_sound,
    messages.OpenAudio: OpenedItem.open_audio,
    messages.DecodeAudio: OpenedItem.decode_audio,
    messages.LoadImage: OpenedItem.load_image,
}


def answer(item: OpenedItem, request: messages.DecodeRequest, memory: Memory) -> messages.DecodeReply:
    """Carry out a request. Decoders raise whatever they like about a stranger's bytes."""
    try:
        reply = HANDLERS[type(request)](item, request)
    except Exception as error:
        detail = repr(error)[:500]
        code = error.code if isinstance(error, soundfile.LibsndfileError) else 0
        is_memory = isinstance(error, MemoryError) or getattr(error, "code", 0) == cv2.Error.STS_NO_MEM
        if is_memory or memory.was_near_limit():
            return messages.Failed("memory", detail)
        # FFmpeg's errors are OSErrors, with numbers of its own choice.
        is_machine = is_transient(error) and not isinstance(error, av.error.FFmpegError)
        return messages.Failed("machine" if is_machine else "media", detail, code)
    # FFmpeg's lack of memory looks like a damaged frame.
    is_short = isinstance(reply, messages.Grabbed) and 0 in reply.are_good
    if is_short and memory.was_near_limit():
        return messages.Failed("memory", "frames failed near the limit")
    return reply


def serve(channel: socket.socket, memory: Memory, max_output: int) -> None:
    """Answer the host's requests until it closes its end."""
    with contextlib.ExitStack() as opened:
        item: OpenedItem | None = None
        _send(channel, messages.Acknowledged())
        while True:
            packet, files, _, _ = socket.recv_fds(channel, messages.MAX_BYTES, 2)
            if not packet:
                return
            request = messages.REQUESTS.decode(packet)
            reply: messages.DecodeReply = messages.Acknowledged()
            if isinstance(request, messages.Begin):
                opened.close()
                for file in files:
                    opened.callback(os.close, file)
                item = opened.enter_context(OpenedItem(files[0], Output(files[1], max_output)))
                _limit_cpu(request.cpu_s)
                memory.forget_peak()
            elif isinstance(request, messages.End):
                item = None
                opened.close()
                memory.trim()
                reply = messages.Ended(memory.num_bytes)
            elif item is not None:
                reply = answer(item, request, memory)
            _send(channel, reply)


def _send(channel: socket.socket, reply: messages.DecodeReply) -> None:
    channel.send(messages.ENCODER.encode(reply))


def _limit_cpu(cpu_s: int) -> None:
    """End this process by SIGXCPU when its threads have used `cpu_s` seconds more together."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(
        resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime) + cpu_s, resource.RLIM_INFINITY)
    )


def main(channel: int, lifeline: int, num_bytes: int, max_output: int) -> None:
    # A terminal's Ctrl-C reaches the whole group; the host may still drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")  # rather this process than the host or its engine
    end_with_peer(lifeline)
    AvifImagePlugin.DEFAULT_MAX_THREADS = 2  # else one per core, each with a stack that counts as memory
    Image.MAX_IMAGE_PIXELS = None  # the host has compared the size with its own limit
    with socket.socket(fileno=channel) as opened, contextlib.suppress(ConnectionError):
        serve(opened, Memory(num_bytes), max_output)


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:]))
