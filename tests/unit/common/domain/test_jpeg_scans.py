"""Scans of a JPEG: those that its decoder would make, whatever else is in the file. Real Pillow."""

import io
import random

import pytest
from PIL import Image

from tests.support.hostile.chunks import jpeg_segment, scan_bomb
from tests.support.hostile.images import saved
from triptych_common.domain import jpeg_scans
from triptych_common.domain.jpeg_scans import MAX_JPEG_MARKERS, MAX_JPEG_SCANS, has_too_many_scans

PICTURE = Image.effect_noise((64, 64), 80).convert("RGB")
PROGRESSIVE = saved(PICTURE, "JPEG", progressive=True)
NUM_SCANS = PROGRESSIVE.count(b"\xff\xda")
MANY_STARTS = b"\xff\xda" * 4 * MAX_JPEG_SCANS
AT_MOST = scan_bomb(PROGRESSIVE, MAX_JPEG_SCANS - NUM_SCANS)
TOO_MANY = scan_bomb(PROGRESSIVE, MAX_JPEG_SCANS - NUM_SCANS + 1)


def behind_the_start(jpeg: bytes, more: bytes) -> bytes:
    return jpeg[:2] + more + jpeg[2:]


@pytest.mark.parametrize(
    "jpeg",
    [
        PROGRESSIVE,
        AT_MOST,
        PROGRESSIVE + random.Random(1).randbytes(8 << 20),
        PROGRESSIVE + MANY_STARTS,
        PROGRESSIVE + PROGRESSIVE * MAX_JPEG_SCANS,
        behind_the_start(PROGRESSIVE, jpeg_segment(0xE2, MANY_STARTS * 100)),
        behind_the_start(PROGRESSIVE, jpeg_segment(0xFE, TOO_MANY)),
        saved(PICTURE, "JPEG", restart_marker_blocks=1),
        saved(PICTURE.resize((2000, 2000)), "JPEG", quality=100),
    ],
    ids=["plain", "at most", "random", "video", "pictures", "large APP2", "comment", "restarts", "large"],
)
def test_what_is_taken_can_be_decoded(jpeg: bytes) -> None:
    assert not has_too_many_scans(jpeg)
    with Image.open(io.BytesIO(jpeg)) as image:
        image.load()


@pytest.mark.parametrize(
    "jpeg",
    [
        TOO_MANY,
        TOO_MANY + bytes(1 << 20),
        behind_the_start(TOO_MANY, jpeg_segment(0xE2, b"\xff\xd9" * 100)),
        behind_the_start(TOO_MANY, b"\xff\xd9\xff\xd8"),
        TOO_MANY.replace(b"\xff\xda", b"\xff\xff\xff\xda"),
    ],
    ids=["plain", "trailer", "ends in APP2", "tables first", "fillers"],
)
def test_scans_that_a_decoder_would_make_are_counted(jpeg: bytes) -> None:
    with Image.open(io.BytesIO(jpeg)) as image:
        image.load()
    assert has_too_many_scans(jpeg)


def test_the_walk_is_bounded() -> None:
    assert has_too_many_scans(behind_the_start(PROGRESSIVE, jpeg_segment(0xE5, b"") * MAX_JPEG_MARKERS))


@pytest.mark.parametrize("num_bytes", range(1, 6))
def test_a_marker_between_two_windows_is_seen(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg_scans, "WINDOW_BYTES", num_bytes)
    assert has_too_many_scans(TOO_MANY)
    assert not has_too_many_scans(AT_MOST)
