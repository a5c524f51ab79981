"""vLLM's own reader of videos within bounds, where an instance takes raw ones. How they are kept: see
`tests/unit/encoder/preprocessing/test_video_and_audio.py`."""

import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import av
import numpy as np
import pytest
from vllm.multimodal.media.connector import MediaConnector
from vllm.multimodal.media.video import VideoMediaIO

from tests.support.families.media import VideoShape, encoded
from triptych_common.domain.media_bounds import DecodingBounds, VideoBounds
from triptych_vllm_connector.decoding.processes import DecodeProcesses
from triptych_vllm_connector.host.video_reader import VideoRefusedError, read_videos_within

SHAPE = VideoShape(64, 48, num_frames=8, frames_per_s=4)
NUM_PIXELS = SHAPE.width * SHAPE.height
WIDE = VideoBounds(10.0, NUM_PIXELS, NUM_PIXELS * SHAPE.num_frames, NUM_PIXELS * SHAPE.num_frames)
PROCESSES = DecodeProcesses(DecodingBounds())


@pytest.fixture
def within() -> Iterator[Callable[[VideoBounds], None]]:
    """`read_videos_within`, until the test ends."""
    before = VideoMediaIO.load_bytes, VideoMediaIO.load_base64
    yield partial(read_videos_within, processes=PROCESSES)
    VideoMediaIO.load_bytes, VideoMediaIO.load_base64 = before


def read(media: bytes, media_type: str = "application/octet-stream") -> Any:
    """As vLLM's server reads a data URL."""
    url = f"data:{media_type};base64,{base64.b64encode(media).decode()}"
    return MediaConnector().fetch_video(url)


def test_frames_are_vllms_own(within: Callable[[VideoBounds], None]) -> None:
    media = encoded(SHAPE, 1)
    frames, metadata = read(media).media if hasattr(read(media), "media") else read(media)
    within(WIDE)
    got = read(media)
    got_frames, got_metadata = got.media if hasattr(got, "media") else got
    assert np.array_equal(frames, got_frames)
    assert metadata == got_metadata


@pytest.mark.parametrize(
    "bounds",
    [
        replace(WIDE, max_s=1.0),
        replace(WIDE, max_frame_pixels=NUM_PIXELS - 1),
        replace(WIDE, max_pixels=NUM_PIXELS),
        replace(WIDE, max_file_pixels=NUM_PIXELS),
    ],
)
def test_what_is_beyond_the_bounds_is_refused(
    within: Callable[[VideoBounds], None], bounds: VideoBounds
) -> None:
    within(bounds)
    with pytest.raises(VideoRefusedError, match=r"video"):
        read(encoded(SHAPE, 1))


@pytest.mark.parametrize(
    "media", [b"#EXTM3U\nhttp://127.0.0.1/\n", b"RIFF\x24\0\0\0WAVEfmt " + bytes(90), b""]
)
def test_what_is_no_video_reaches_no_decoder(
    within: Callable[[VideoBounds], None], media: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    within(WIDE)
    lent: list[object] = []
    monkeypatch.setattr(DecodeProcesses, "lend", lambda *args: lent.append(args))
    for media_type in ("video/mp4", "video/jpeg"):  # vLLM reads the latter as a list of images
        with pytest.raises(VideoRefusedError, match="not a video"):
            read(media, media_type)
    assert not lent


def test_a_codec_without_a_decoder_is_refused_by_its_name(within: Callable[[VideoBounds], None]) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libsvtav1", rate=SHAPE.frames_per_s)
        stream.width, stream.height, stream.pix_fmt = SHAPE.width, SHAPE.height, "yuv420p"
        for _ in range(SHAPE.num_frames):
            frame = av.VideoFrame.from_ndarray(np.zeros((SHAPE.height, SHAPE.width, 3), np.uint8), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    within(WIDE)
    with pytest.raises(VideoRefusedError, match="codec is 'AV01'"):
        read(file.getvalue())
