"""Images, videos and sounds of several sizes. The same sample always has the same bytes."""

import base64
import functools
import io
import tempfile
import wave
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.families.family import MediaKind

NUM_CHANNELS = 3
VIDEO_BLOCKS = 4  # a frame is 4 x 4 plain blocks: they outlive the codec
IMAGE_BLOCKS = (6, 8)
FULL_SCALE = 2**15


@dataclass(frozen=True)
class ImageShape:
    width: int
    height: int


@dataclass(frozen=True)
class VideoShape:
    width: int
    height: int
    num_frames: int
    frames_per_s: int


@dataclass(frozen=True)
class TimedVideoShape:
    """A video whose frames come at a rate of their own, or at times that follow from the seed."""

    width: int  # may be odd
    height: int
    duration_s: float
    frames_per_s: float
    has_variable_rate: bool = False

    @property
    def num_frames(self) -> int:
        return max(round(self.duration_s * self.frames_per_s), 1)


@dataclass(frozen=True)
class AudioShape:
    duration_s: float
    samples_per_s: int


Shape = ImageShape | VideoShape | TimedVideoShape | AudioShape

SHAPES: dict[MediaKind, tuple[Shape, ...]] = {
    MediaKind.IMAGE: (
        ImageShape(120, 84),
        ImageShape(60, 150),
        ImageShape(224, 112),
        ImageShape(200, 240),
        ImageShape(28, 28),
        ImageShape(168, 168),
    ),
    # All of one number of frames: vLLM 0.32 ends LLaVA-OneVision's engine at a batch of different numbers.
    MediaKind.VIDEO: (
        VideoShape(112, 84, num_frames=8, frames_per_s=4),
        VideoShape(84, 112, num_frames=8, frames_per_s=1),
        VideoShape(64, 64, num_frames=8, frames_per_s=2),
    ),
    MediaKind.AUDIO: (
        AudioShape(0.7, 16_000),
        AudioShape(1.5, 16_000),
        AudioShape(2.2, 8_000),
        AudioShape(0.5, 24_000),
    ),
}
"""A prompt's length follows from them. Some sounds are resampled, and some videos lose frames."""


@dataclass(frozen=True)
class Sample:
    """A medium, as a function of its shape and a seed."""

    kind: MediaKind
    shape: Shape
    seed: int

    @property
    def data(self) -> bytes:
        return encoded(self.shape, self.seed)

    def part(self) -> dict[str, Any]:
        """A content part of a chat message; sounds in one spelling or the other, by their seed."""
        text = base64.b64encode(self.data).decode()
        match self.kind:
            case MediaKind.IMAGE:
                return _url_part("image_url", "image/png", text)
            case MediaKind.VIDEO:
                return _url_part("video_url", "video/mp4", text)
            case MediaKind.AUDIO if self.seed % 2:
                return _url_part("audio_url", "audio/wav", text)
            case MediaKind.AUDIO:
                return {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}}


def _url_part(name: str, media_type: str, text: str) -> dict[str, Any]:
    return {"type": name, name: {"url": f"data:{media_type};base64,{text}"}}


@functools.cache
def encoded(shape: Shape, seed: int) -> bytes:
    """A PNG, an MP4 or a WAV file."""
    rng = np.random.default_rng(seed)
    match shape:
        case ImageShape():
            return _image(shape, rng)
        case VideoShape():
            return _video(shape, rng)
        case TimedVideoShape():
            return _timed_video(shape, rng)
        case AudioShape():
            return _audio(shape, rng)


def _image(shape: ImageShape, rng: np.random.Generator) -> bytes:
    blocks = rng.integers(0, 256, (*IMAGE_BLOCKS, NUM_CHANNELS), dtype=np.uint8)
    image = Image.fromarray(blocks).resize((shape.width, shape.height), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _video(shape: VideoShape, rng: np.random.Generator) -> bytes:
    import cv2  # vLLM's own requirement; it decodes with it too

    block = np.ones((shape.height // VIDEO_BLOCKS, shape.width // VIDEO_BLOCKS, 1), np.uint8)
    with tempfile.TemporaryDirectory(prefix="triptych-video-") as folder:
        file = Path(folder) / "video.mp4"
        codec = cv2.VideoWriter.fourcc(*"mp4v")
        writer = cv2.VideoWriter(str(file), codec, shape.frames_per_s, (shape.width, shape.height))
        for _ in range(shape.num_frames):
            colours = rng.integers(0, 256, (VIDEO_BLOCKS, VIDEO_BLOCKS, NUM_CHANNELS), dtype=np.uint8)
            writer.write(np.kron(colours, block))
        writer.release()
        return file.read_bytes()


def _timed_video(shape: TimedVideoShape, rng: np.random.Generator) -> bytes:
    """MPEG-4 Part 2, with a time stamp of its own for each frame."""
    import av  # vLLM's own requirement

    times_ms = np.arange(shape.num_frames) * 1000 / shape.frames_per_s
    if shape.has_variable_rate:
        gaps_ms = rng.uniform(0.2, 1.8, shape.num_frames) * 1000 / shape.frames_per_s
        times_ms = np.cumsum(gaps_ms) - gaps_ms[0]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.pix_fmt = shape.width, shape.height, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for number, at_ms in enumerate(times_ms):
            blocks = rng.integers(0, 256, (VIDEO_BLOCKS, VIDEO_BLOCKS, NUM_CHANNELS), dtype=np.uint8)
            size = (shape.width, shape.height)
            pixels = np.asarray(Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST))
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = max(round(at_ms), number), Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def _audio(shape: AudioShape, rng: np.random.Generator) -> bytes:
    """Three gliding tones, one of them with noise."""
    at_s = np.arange(int(shape.samples_per_s * shape.duration_s)) / shape.samples_per_s
    signal = 0.05 * rng.standard_normal(len(at_s))
    for _ in range(3):
        start_hz, glide_hz_per_s = rng.uniform(100, 3000), rng.uniform(-400, 400)
        signal += rng.uniform(0.1, 0.3) * np.sin(2 * np.pi * (start_hz + glide_hz_per_s * at_s / 2) * at_s)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(shape.samples_per_s)
        file.writeframes((np.clip(signal, -1, 1) * (FULL_SCALE - 1)).astype("<i2").tobytes())
    return buffer.getvalue()
