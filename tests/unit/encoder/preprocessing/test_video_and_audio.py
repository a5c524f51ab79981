"""Videos and audio, decoded as vLLM's own server decodes them; what is beyond the bounds is not decoded."""

import contextlib
import functools
import io
import random
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
from vllm.multimodal.media.audio import AudioMediaIO
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from tests.support.message_samples import encode_job
from triptych_common.domain.media_bounds import AudioBounds, VideoBounds
from triptych_common.domain.media_options import OptionBounds
from triptych_common.protocol.messages import Modality
from triptych_encoder.encoding import BadMediaError, PreprocessLimits
from triptych_encoder.preprocessing.media_decoders import MediaDecoders

WIDTH, HEIGHT, NUM_FRAMES, FPS = 64, 48, 12, 4
FRAME = WIDTH * HEIGHT
BOUNDS = VideoBounds(
    max_s=10.0, max_frame_pixels=FRAME, max_pixels=FRAME * NUM_FRAMES, max_file_pixels=FRAME * NUM_FRAMES
)
NUM_DAMAGED = 300
MAX_AUDIO = AudioBounds(max_s=2.0, max_bytes=40_000)


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file: Path = tmp_path_factory.mktemp("video") / "video.mp4"
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"mp4v"), FPS, (WIDTH, HEIGHT))
    for number in range(NUM_FRAMES):
        writer.write(np.full((HEIGHT, WIDTH, 3), 20 * number, dtype=np.uint8))
    writer.release()
    return file.read_bytes()


def sound(seconds: float, rate: int = 8000) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(np.arange(int(seconds * rate), dtype=np.int16).tobytes())
    return buffer.getvalue()


@functools.cache
def decoders(bounds: VideoBounds, backend: str | None) -> MediaDecoders:
    """With child processes of their own, that all tests share."""
    limits = PreprocessLimits(
        image_formats=("PNG",),
        max_image_pixels=1000,
        processor_options={},
        media_options={Modality.VIDEO: {"num_frames": OptionBounds(min=1, max=8)}},
        video=bounds,
        audio=MAX_AUDIO,
        timeout_s=10.0,
        num_pixels=1000,
        num_threads=1,
        stuck_after_s=10.0,
    )
    return MediaDecoders(limits, backend)


def decode(
    modality: Modality,
    media: bytes,
    bounds: VideoBounds = BOUNDS,
    options: dict[str, Any] | None = None,
    backend: str | None = None,
) -> Any:
    job = encode_job(
        job_id="j", modality=modality, media_num_bytes=max(len(media), 1), media_io_kwargs=options or {}
    )
    return decoders(bounds, backend).decode(job, media)


@pytest.mark.parametrize("backend", [None, "qwen3_vl"])
@pytest.mark.parametrize("options", [{}, {"num_frames": 3}, {"fps": 1}], ids=str)
def test_frames_are_those_that_a_monolith_takes(
    video: bytes, options: dict[str, Any], backend: str | None
) -> None:
    chosen = {} if backend is None else {"video_backend": backend}
    want_frames, want_metadata = (
        VideoMediaIO(ImageMediaIO(image_mode="RGB"), **chosen, **options).load_bytes(video).media
    )
    frames, metadata = decode(Modality.VIDEO, video, options=options, backend=backend).media
    assert np.array_equal(frames, want_frames)
    assert metadata == want_metadata


@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        (replace(BOUNDS, max_s=2.9), "longer"),
        (replace(BOUNDS, max_frame_pixels=FRAME - 1), "frames of"),
        (replace(BOUNDS, max_pixels=FRAME * NUM_FRAMES - 1), "together"),
        (replace(BOUNDS, max_file_pixels=FRAME * NUM_FRAMES - 1), "all of"),
    ],
)
def test_a_video_beyond_the_bounds_is_not_decoded(video: bytes, bounds: VideoBounds, why: str) -> None:
    with pytest.raises(BadMediaError, match=why):
        decode(Modality.VIDEO, video, bounds)


@pytest.mark.parametrize(
    "media",
    [b"", b"#EXTM3U\n", sound(0.1), b"\0\0\0\x20ftypisom" + bytes(100), b"\x1aE\xdf\xa3" + bytes(100)],
    ids=["nothing", "play list", "sound", "mp4", "webm"],
)
def test_what_is_no_video(media: bytes) -> None:
    with pytest.raises(BadMediaError):
        decode(Modality.VIDEO, media)


def test_samples_are_those_that_a_monolith_takes() -> None:
    samples, rate = decode(Modality.AUDIO, sound(1.0))
    want_samples, want_rate = AudioMediaIO().load_bytes(sound(1.0))
    assert rate == want_rate == 8000
    assert np.array_equal(samples, want_samples)


@pytest.mark.parametrize("media", [b"", b"#EXTM3U\n", b"fLaC" + bytes(60), sound(2.5), sound(1.5, 16_000)])
def test_what_is_no_audio_or_too_long(media: bytes) -> None:
    with pytest.raises(BadMediaError):
        decode(Modality.AUDIO, media)


def damaged(media: bytes, rng: random.Random) -> bytes:
    """With a few bytes changed behind its first ones, and often cut off."""
    data = bytearray(media)
    if rng.random() < 0.3:
        del data[rng.randrange(64, len(data)) :]
    for _ in range(rng.randrange(30)):
        data[rng.randrange(12, len(data))] = rng.randrange(256)
    return bytes(data)


@pytest.mark.parametrize("modality", [Modality.VIDEO, Modality.AUDIO])
def test_damaged_files_are_decoded_or_refused(modality: Modality, video: bytes) -> None:
    rng = random.Random(7)
    media = video if modality is Modality.VIDEO else sound(0.2)
    for _ in range(NUM_DAMAGED):
        with contextlib.suppress(BadMediaError):
            decode(modality, damaged(media, rng))


def test_codecs_that_are_not_listed_are_refused_by_their_name() -> None:
    """JPEG 2000 took a core for minutes, and gigabytes."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        video = container.add_stream("jpeg2000", rate=FPS)
        video.width, video.height, video.pix_fmt = WIDTH, HEIGHT, "rgb24"
        frame = av.VideoFrame.from_ndarray(np.zeros((HEIGHT, WIDTH, 3), np.uint8), "rgb24")
        container.mux([*video.encode(frame), *video.encode()])
    with pytest.raises(BadMediaError, match="codec 'jpeg2000' is not decoded here"):
        decode(Modality.VIDEO, file.getvalue())
    file = io.BytesIO()
    with av.open(file, "w", format="wav") as container:
        audio = container.add_stream("wmav2", rate=44_100, layout="mono", bit_rate=64_000)
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 2048), np.float32), "fltp", "mono")
        samples.sample_rate = 44_100
        container.mux([*audio.encode(samples), *audio.encode()])
    with pytest.raises(BadMediaError, match="codec 'wmav2' is not decoded here"):
        decode(Modality.AUDIO, file.getvalue())
