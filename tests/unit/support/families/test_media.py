"""Samples are what they say, and the same on every run."""

from pathlib import Path

import cv2
import pytest

from tests.support.families.family import MediaKind
from tests.support.families.media import SHAPES, VideoShape, encoded


@pytest.mark.parametrize("shape", SHAPES[MediaKind.VIDEO], ids=str)
def test_a_video_has_its_frames_and_their_rate(shape: VideoShape, tmp_path: Path) -> None:
    file = tmp_path / "video.mp4"
    file.write_bytes(encoded(shape, 1))
    capture = cv2.VideoCapture(str(file))
    frames = []
    while (frame := capture.read())[0]:
        frames.append(frame[1])
    rate = capture.get(cv2.CAP_PROP_FPS)
    capture.release()
    assert (len(frames), rate) == (shape.num_frames, shape.frames_per_s)
    assert {frame.shape for frame in frames} == {(shape.height, shape.width, 3)}
    apart = abs(frames[0].astype(int) - frames[-1].astype(int)).mean()
    assert apart > 20, "the codec left no difference between frames"
