"""What reading a header may cost."""

import io
import time
from collections.abc import Callable

import pytest
from PIL import Image

from tests.support.gateway.header_bombs import BOMBS, HONEST, SIZE, icon_of_png
from tests.support.gateway.samples import image_bytes
from tests.support.hostile import chunks
from tests.support.hostile.images import saved
from triptych_common.domain.errors import RequestError
from triptych_common.domain.jpeg_scans import MAX_JPEG_SCANS
from triptych_common.runtime.media_settings import IMAGE_FORMATS
from triptych_gateway.request.image_header import ImageHeader, ImageLimits, read_image_header

PATH = "messages[0].content[0].image_url.url"
LIMITS = ImageLimits(max_pixels=64_000_000, formats=IMAGE_FORMATS)


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda each: each.__name__)
def test_a_header_that_costs_too_much_is_refused(bomb: Callable[[], bytes]) -> None:
    content = bomb()
    began = time.thread_time()
    with pytest.raises(RequestError) as caught:
        read_image_header(content, PATH, LIMITS)
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (400, "invalid_image", PATH)
    print(f"{bomb.__name__}: {time.thread_time() - began:.3f} s of CPU")  # not asserted: machines differ


@pytest.mark.parametrize("image", HONEST, ids=lambda each: each.__name__)
def test_large_metadata_are_no_fault(image: Callable[[], bytes]) -> None:
    header = read_image_header(image(), PATH, LIMITS)
    assert (header.width, header.height) == SIZE


@pytest.mark.parametrize("bitmap_format", ["png", "bmp"])
@pytest.mark.parametrize("mode", ["1", "P", "RGB", "RGBA"])
def test_the_size_of_an_icon_is_that_of_the_picture_that_pillow_opens(bitmap_format: str, mode: str) -> None:
    sizes = [(16, 16), (48, 48), (32, 32)]
    content = saved(Image.new(mode, (64, 64)), "ICO", sizes=sizes, bitmap_format=bitmap_format)
    with Image.open(io.BytesIO(content)) as image:
        assert read_image_header(content, PATH, LIMITS) == ImageHeader("ICO", *image.size)


def test_a_picture_that_an_icon_hides_is_no_larger_than_any_other() -> None:
    with pytest.raises(RequestError) as caught:
        read_image_header(icon_of_png(chunks.png(30_000, 30_000, [])), PATH, LIMITS)
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (413, "image_too_large", PATH)


def test_a_jpeg_of_too_many_scans_is_refused() -> None:
    """Here, since with local encode no encoder checks it."""
    with pytest.raises(RequestError, match="scans") as caught:
        read_image_header(chunks.scan_bomb(image_bytes(image_format="JPEG"), MAX_JPEG_SCANS), PATH, LIMITS)
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (400, "invalid_image", PATH)


@pytest.mark.parametrize(
    "content",
    [chunks.bmp_header(2_000_000, 1), chunks.bmp_header(1, 2_000_000), chunks.png(2_000_000, 1, [])],
    ids=["bmp wide", "bmp high", "png wide"],
)
def test_a_side_that_no_job_can_name_is_refused(content: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read_image_header(content, PATH, LIMITS)
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (413, "image_too_large", PATH)
