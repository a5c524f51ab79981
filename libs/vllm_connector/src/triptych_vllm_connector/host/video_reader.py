"""From a video's bytes to its sampled frames: vLLM's own loaders, stopped before they cost too much.

Which frames are taken depends on the model, and vLLM knows it. It looks for the video's end, chooses frames,
and decodes all of them up to the last one. What the file says of itself is looked at before; then the chosen
frames are counted, and the time is watched while they are decoded.
"""

import os
import time
from typing import Any

import cv2
from pybase64 import b64decode
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.video_decoders import opencv

from triptych_common.domain.containers import VIDEO_CONTAINERS, container_of
from triptych_common.domain.media_bounds import VideoBounds

MAX_FRAMES_PER_S = 240  # of the file; more is no camera's
_load_bytes = VideoMediaIO.load_bytes


class VideoRefusedError(ValueError):
    """No video that is decoded here, or one beyond the bounds. Its text is shown to the caller."""


def _open_capture(data: bytes) -> Any:
    """OpenCV's capture of a file in memory that has no name.

    vLLM has it read from a Python buffer; there OpenCV 5 ends the process for some files that are damaged.

    Raises:
        ValueError: it cannot be opened.
    """
    file = os.memfd_create("video", os.MFD_CLOEXEC)
    try:
        with open(file, "wb", closefd=False) as writer:
            writer.write(data)
        capture = cv2.VideoCapture(f"/proc/self/fd/{file}", cv2.CAP_FFMPEG, [])
    finally:
        os.close(file)  # FFmpeg has opened it anew
    if not capture.isOpened():
        raise ValueError("the video cannot be opened")
    return capture


opencv.OpenCVVideoBackendMixin.open_video_capture = staticmethod(_open_capture)


class _WatchedCapture:
    """OpenCV's capture, whose frames are decoded until `deadline`, a monotonic second."""

    def __init__(self, capture: Any, deadline: float) -> None:
        self._capture = capture
        self._deadline = deadline

    def __getattr__(self, name: str) -> Any:
        if time.monotonic() > self._deadline:
            raise VideoRefusedError("the video takes too long to decode")
        return getattr(self._capture, name)


class _BoundedLoader:
    """Mixin in front of one of vLLM's loaders."""

    bounds: VideoBounds
    deadline: float

    @classmethod
    def read_frames(cls, cap: Any, frame_indices: list[int], *args: Any, **kwargs: Any) -> Any:
        if _num_pixels(cap) * len(frame_indices) > cls.bounds.max_pixels:
            message = f"the video's frames have more than {cls.bounds.max_pixels} pixels together"
            raise VideoRefusedError(message)
        watched = _WatchedCapture(cap, cls.deadline)
        frames, valid = super().read_frames(watched, frame_indices, *args, **kwargs)  # type: ignore[misc]
        if not valid:  # OpenCV's FFmpeg opens AV1, for example, and has no decoder for it
            codec = int(cap.get(cv2.CAP_PROP_FOURCC)).to_bytes(4, "little").decode("ascii", "replace")
            message = f"OpenCV cannot decode any frame of the video, whose codec is {codec!r}"
            raise VideoRefusedError(f"{message}; H.264 and VP9, for example, are decoded")
        return frames, valid


def _num_pixels(cap: Any) -> int:
    """Of a frame."""
    return int(cap.get(cv2.CAP_PROP_FRAME_WIDTH)) * int(cap.get(cv2.CAP_PROP_FRAME_HEIGHT))


def _check_file(media: bytes, bounds: VideoBounds) -> None:
    """By what the file says of itself: nothing is decoded."""
    cap = _open_capture(media)
    try:
        num_pixels, num_frames = _num_pixels(cap), int(cap.get(cv2.CAP_PROP_FRAME_COUNT))
        fps = cap.get(cv2.CAP_PROP_FPS)
    finally:
        cap.release()
    if num_frames < 1:
        raise VideoRefusedError("the video has no frames")
    if num_frames > bounds.max_s * (min(fps, MAX_FRAMES_PER_S) if fps > 0 else MAX_FRAMES_PER_S):
        raise VideoRefusedError(f"the video is longer than {bounds.max_s:g} s")
    if not 0 < num_pixels <= bounds.max_frame_pixels:
        raise VideoRefusedError(f"the video has no frames of 1 to {bounds.max_frame_pixels} pixels")
    if num_pixels * num_frames > bounds.max_file_pixels:
        message = f"all of the video's frames have more than {bounds.max_file_pixels} pixels"
        raise VideoRefusedError(message)


def load_video(reader: VideoMediaIO, media: bytes, bounds: VideoBounds) -> Any:
    """Frames and their times, as `reader` makes them. Blocks.

    Raises:
        VideoRefusedError: as it says.
        Exception: whatever decoders raise about a stranger's bytes.
    """
    if container_of(media, VIDEO_CONTAINERS) is None:
        raise VideoRefusedError("the bytes are not a video of a format that is decoded")
    deadline = time.monotonic() + bounds.timeout_s
    _check_file(media, bounds)
    loader = type(reader.video_loader)
    bounded = {"bounds": bounds, "deadline": deadline}
    reader.video_loader = type(loader.__name__, (_BoundedLoader, loader), bounded)()
    return _load_bytes(reader, media)


def read_videos_within(bounds: VideoBounds) -> None:
    """From now on this process's vLLM decodes videos by `load_video` alone.

    Nothing else of it that looks like a video is read: sequences of JPEGs have no file that could be checked.
    """

    def load_bytes(reader: VideoMediaIO, media: bytes) -> Any:
        return load_video(reader, media, bounds)

    def load_base64(reader: VideoMediaIO, media_type: str, data: str) -> Any:
        return load_bytes(reader, b64decode(data, validate=True))

    VideoMediaIO.load_bytes = load_bytes
    VideoMediaIO.load_base64 = load_base64
