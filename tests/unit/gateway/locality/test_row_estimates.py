"""Rows and bytes of items whose sizes are not known, by those of late."""

import pytest

from tests.support.message_samples import cache_metadata
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncoderCacheMetadata, ImageProperties, Modality
from triptych_gateway.locality.encode_stores import FIRST_ROW_BYTES, FIRST_ROWS, RowEstimates

LARGE = ImageProperties(format="PNG", width=2000, height=1000)


def metadata(mm_hash: str, num_rows: int, row_bytes: int = 100) -> EncoderCacheMetadata:
    return cache_metadata(
        mm_hash=mm_hash, num_embeds=num_rows, width=25, num_bytes=num_rows * row_bytes, sealed=True
    )


def test_at_first_by_the_pixels() -> None:
    rows = RowEstimates()
    assert rows.rows_of(MmHash("a" * 64), Modality.IMAGE, LARGE) == 2 * FIRST_ROWS
    assert rows.bytes_of(10) == 10 * FIRST_ROW_BYTES


def test_learned_from_what_was_asked_about() -> None:
    rows = RowEstimates()
    for number in range(60):
        mm_hash = MmHash(f"{number:064x}")
        rows.rows_of(mm_hash, Modality.IMAGE, LARGE)
        rows.observe(metadata(mm_hash, 400))
    assert rows.rows_of(MmHash("f" * 64), Modality.IMAGE, LARGE) == pytest.approx(400)
    assert rows.mean_rows == pytest.approx(400, rel=0.01)
    assert rows.bytes_of(400) == pytest.approx(40_000, rel=0.01)
    assert rows.rows_of(MmHash("e" * 64), Modality.AUDIO, None) == FIRST_ROWS, "of images alone"


def test_of_an_item_that_was_not_asked_about_its_pixels_are_not_known() -> None:
    rows = RowEstimates()
    rows.observe(metadata("b" * 64, 1))
    assert rows.rows_of(MmHash("a" * 64), Modality.IMAGE, LARGE) == 2 * FIRST_ROWS
