"""Video decoding with vLLM's own loaders, on a decoder that can be ended.

vLLM knows which frames a model takes. It looks for the video's end, chooses frames, and decodes all up to the
last one. The file's own facts are checked before; then the chosen frames are counted. OpenCV runs in a child
process (`decoding`): vLLM's loaders call a `RemoteCapture`.
"""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import cv2
import numpy as np
from pybase64 import b64decode
from vllm.multimodal.media.connector import MediaConnector
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.video import PyNvVideoCodecVideoBackend, VideoLoader
from vllm.multimodal.video_decoders import opencv

from triptych_common.domain.containers import VIDEO_CONTAINERS, container_of
from triptych_common.domain.media_bounds import VideoBounds, refused_codec
from triptych_vllm_connector.decoding import messages
from triptych_vllm_connector.decoding.processes import (
    DecodeProcesses,
    DecoderError,
    MediaRefusedError,
    Session,
)
from triptych_vllm_connector.seams.current import seam
from triptych_vllm_connector.seams.replacing import replace, require_names

DEMUXERS = {"mp4": "mov", "webm": "matroska", "avi": "avi"}  # FFmpeg's names of our containers
MAX_FRAMES_PER_S = 240  # frame rates above this come from no camera
THREAD_BYTES_PER_PIXEL = 8  # two frames of 10 bits: FFmpeg decodes a frame in each thread
MAX_THREADS = 16
_load_bytes = VideoMediaIO.load_bytes
require_names((_load_bytes,), "video_loader")
require_names((opencv.decode_opencv,), "read_frames")


class VideoRefusedError(MediaRefusedError):
    """The video is of a kind not decoded here, or beyond the bounds. The text is shown to the caller."""


class RemoteCapture:
    """OpenCV's `VideoCapture`, as vLLM's loaders use it, of a video that a child process has open."""

    def __init__(self, session: Session, container: str, bounds: VideoBounds) -> None:
        """Raises VideoRefusedError: its codec is not decoded here."""
        self.bounds = bounds
        self._session = session
        self._grabbed: deque[bool] = deque()  # by the child, and not yet by vLLM
        self._targets: deque[int] = deque()  # frames to be retrieved, while the child may grab up to them
        self._position = 0
        streams = session.ask(messages.ListStreams(DEMUXERS[container], "video"), messages.Streams)
        codec = refused_codec(streams.codecs, session.bounds.video_codecs)
        if codec is not None:
            raise VideoRefusedError(f"the codec {codec or 'of the video'!r} is not decoded here")
        num_threads = session.bounds.num_bytes // (THREAD_BYTES_PER_PIXEL * max(streams.num_pixels, 1))
        self._opening = messages.OpenCapture(min(max(num_threads, 1), MAX_THREADS))
        session.ask(self._opening, messages.Acknowledged)
        self._was_moved = False

    def reopen(self) -> None:
        """Open the video again unless nothing was sought in it: vLLM decodes from a capture of its own."""
        if self._was_moved:
            self._session.ask(self._opening, messages.Acknowledged)
            self._was_moved = False

    def count_frames(self) -> int:
        """Number of frames by the demuxer, up to one more than the bounds allow."""
        most = math.ceil(self.bounds.max_s * MAX_FRAMES_PER_S) + 1
        return int(self._session.ask(messages.CountFrames(most), messages.Number).value)

    def get(self, name: int) -> float:
        return self._session.ask(messages.GetProperty(name), messages.Number).value

    def set(self, name: int, value: float) -> bool:
        self._grabbed.clear()
        self._targets.clear()
        self._was_moved = True
        return self._session.ask(messages.SetProperty(name, value), messages.Flag).value

    def expect_targets(self, frame_indices: list[int]) -> None:
        """Let the child grab, at each `grab`, all frames up to the next one of `frame_indices`."""
        self._targets = deque(sorted(set(frame_indices)))
        self._position = 0

    def grab(self) -> bool:
        if not self._grabbed:
            while self._targets and self._targets[0] < self._position:
                self._targets.popleft()
            count = self._targets[0] - self._position + 1 if self._targets else 1
            request = messages.Grab(min(count, messages.MAX_GRABBED))
            grabbed = self._session.ask(request, messages.Grabbed).are_good
            if len(grabbed) != request.count:
                raise DecoderError("not as many frames as were asked for", 0)
            self._grabbed.extend(map(bool, grabbed))
        self._position += 1
        return self._grabbed.popleft()

    def retrieve(self) -> tuple[bool, Any]:
        """Return the frame that was grabbed last, in memory that the next one overwrites."""
        frame = self._session.ask(messages.Retrieve(), messages.Frame)
        num_pixels = frame.height * frame.width
        if num_pixels == 0:
            return False, None
        if not 0 < num_pixels <= self.bounds.max_frame_pixels:
            raise VideoRefusedError(
                f"the video has a frame of more than {self.bounds.max_frame_pixels} pixels"
            )
        shape = (frame.height, frame.width, 3)
        return True, np.ndarray(shape, np.uint8, self._session.view(3 * num_pixels))

    def read(self) -> tuple[bool, Any]:
        return self.retrieve() if self.grab() else (False, None)


_capture: ContextVar[RemoteCapture | None] = ContextVar("capture", default=None)


def _open_capture(data: bytes) -> Any:
    """The capture that `load_video` has opened for this thread; without one, vLLM's own."""
    return _capture.get() or _open_video_capture(data)


def _count_frames(data: bytes) -> int:
    """Number of frames of the capture for this thread; without one, as vLLM counts."""
    capture = _capture.get()
    if capture is None:
        return _demux_count_frames(data)
    count = capture.count_frames()
    if count == 0:
        raise VideoRefusedError("the video has no frames")
    return count


_opencv = opencv.OpenCVVideoBackendMixin
_open_video_capture = replace(
    _opencv, "open_video_capture", staticmethod(_open_capture), used_by=(opencv.decode_opencv,)
)
_demux_count_frames = seam.replace_frame_count(_count_frames)


class _BoundedLoader:
    """Mixin in front of one of vLLM's loaders."""

    bounds: VideoBounds

    @classmethod
    def read_frames(cls, cap: Any, frame_idx: list[int], *args: Any, **kwargs: Any) -> Any:
        if _num_pixels(cap) * len(frame_idx) > cls.bounds.max_pixels:
            message = f"the video's frames have more than {cls.bounds.max_pixels} pixels together"
            raise VideoRefusedError(message)
        if seam.READS_METADATA_APART:
            cap.reopen()
        if cls._grabs_in_order() and not kwargs.get("frame_recovery"):
            cap.expect_targets(frame_idx)
        frames, valid = super().read_frames(cap, frame_idx, *args, **kwargs)  # type: ignore[misc]
        if not valid:  # OpenCV's FFmpeg opens AV1, for example, and has no decoder for it
            codec = int(cap.get(cv2.CAP_PROP_FOURCC)).to_bytes(4, "little").decode("ascii", "replace")
            message = f"OpenCV cannot decode any frame of the video, whose codec is {codec!r}"
            raise VideoRefusedError(f"{message}; H.264 and VP9, for example, are decoded")
        return frames, valid

    @classmethod
    def _grabs_in_order(cls) -> bool:
        """Return whether it grabs every frame up to the last target, and retrieves targets alone."""
        reading = next(each for each in cls.__mro__[2:] if "read_frames" in each.__dict__)
        return reading is VideoLoader


def _num_pixels(cap: Any) -> int:
    return int(cap.get(cv2.CAP_PROP_FRAME_WIDTH)) * int(cap.get(cv2.CAP_PROP_FRAME_HEIGHT))


def _check_file(cap: RemoteCapture, bounds: VideoBounds) -> None:
    """Check the facts in the file's headers; decodes nothing."""
    num_pixels, num_frames = _num_pixels(cap), int(cap.get(cv2.CAP_PROP_FRAME_COUNT))
    fps = cap.get(cv2.CAP_PROP_FPS)
    if num_frames < 1 and seam.READS_METADATA_APART:  # a stream's header has no number
        num_frames = cap.count_frames()
    if num_frames < 1:
        raise VideoRefusedError("the video has no frames")
    if num_frames > bounds.max_s * (min(fps, MAX_FRAMES_PER_S) if fps > 0 else MAX_FRAMES_PER_S):
        raise VideoRefusedError(f"the video is longer than {bounds.max_s:g} s")
    if not 0 < num_pixels <= bounds.max_frame_pixels:
        raise VideoRefusedError(f"the video has no frames of 1 to {bounds.max_frame_pixels} pixels")
    if num_pixels * num_frames > bounds.max_file_pixels:
        message = f"all of the video's frames have more than {bounds.max_file_pixels} pixels"
        raise VideoRefusedError(message)


@contextmanager
def _decoding_with(capture: RemoteCapture) -> Iterator[None]:
    token = _capture.set(capture)
    try:
        yield
    finally:
        _capture.reset(token)


def load_video(reader: VideoMediaIO, media: bytes, bounds: VideoBounds, processes: DecodeProcesses) -> Any:
    """Decode frames and their times, as `reader` makes them. Blocks.

    Raises:
        MediaRefusedError: as it says.
        Exception: whatever decoders raise about a stranger's bytes.
    """
    container = container_of(media, VIDEO_CONTAINERS)
    if container is None:
        raise VideoRefusedError("the bytes are not a video of a format that is decoded")
    loader = type(reader.video_loader)
    is_other = reader.kwargs.get("backend", "opencv") != "opencv"
    if is_other or issubclass(loader, PyNvVideoCodecVideoBackend):
        raise VideoRefusedError("videos are decoded by OpenCV alone; take the option backend out")
    with processes.lend(media, "video") as session:
        capture = RemoteCapture(session, container, bounds)
        _check_file(capture, bounds)
        reader.video_loader = type(loader.__name__, (_BoundedLoader, loader), {"bounds": bounds})()
        with _decoding_with(capture):
            return _load_bytes(reader, media)


def read_videos_within(bounds: VideoBounds, processes: DecodeProcesses) -> None:
    """Make this process's vLLM decode videos by `load_video` only.

    Sequences of JPEGs, which vLLM also reads as videos, are refused: they have no file that could be checked.
    """

    def load_bytes(reader: VideoMediaIO, media: bytes) -> Any:
        return load_video(reader, media, bounds, processes)

    def load_base64(reader: VideoMediaIO, media_type: str, data: str) -> Any:
        return load_bytes(reader, b64decode(data, validate=True))

    replace(VideoMediaIO, "load_bytes", load_bytes, used_by=(MediaConnector.load_from_url_async,))
    replace(VideoMediaIO, "load_base64", load_base64, used_by=(MediaConnector._load_data_url,))
