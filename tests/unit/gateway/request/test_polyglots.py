"""Files of two formats are refused; ordinary files are of one."""

import io

import pytest
from PIL import Image

from tests.support.hostile import chunks
from tests.support.hostile.images import FORMATS, saved
from triptych_common.domain.errors import RequestError
from triptych_gateway.request.image_header import ImageLimits, read_image_header
from triptych_gateway.request.item_checks import check_one_format

PATH = "messages[0].content[0].image_url.url"
LIMITS = ImageLimits(max_pixels=64_000_000, formats=FORMATS)
JPEG = saved(Image.new("RGB", (8, 8), (200, 10, 10)), "JPEG")
PIXELS = bytes(3 * 8 * 8)


def seen_as(content: bytes) -> str:
    """The format that the gateway finds."""
    return read_image_header(content, PATH, LIMITS).format


@pytest.mark.parametrize(
    ("content", "other"),
    [(chunks.jpeg_that_is_fli(JPEG, 64), "FLI"), (chunks.png_that_is_pcd(PIXELS, 8, 8), "PCD")],
    ids=["fli", "pcd"],
)
def test_two_formats(content: bytes, other: str) -> None:
    with Image.open(io.BytesIO(content), formats=[other]) as image:
        assert image.format == other  # it is one
    with pytest.raises(RequestError) as caught:
        check_one_format(content, PATH, seen_as(content))
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (400, "invalid_image", PATH)


@pytest.mark.parametrize("image_format", FORMATS)
@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
@pytest.mark.parametrize("size", [(1, 1), (8, 8), (257, 300), (1025, 17)])
def test_one_format(image_format: str, mode: str, size: tuple[int, int]) -> None:
    image = Image.effect_noise(size, 60).convert(mode)
    as_rgb = image_format in ("WEBP", "JPEG", "JPEG2000", "PPM", "QOI")
    sizes = [(min(size[0], 256), min(size[1], 256))]  # of an icon
    content = saved(image.convert("RGB") if as_rgb else image, image_format, sizes=sizes)
    if image_format == "QOI" and size[0] < 3:  # its width makes it a brush of GIMP's as well
        with pytest.raises(RequestError):
            check_one_format(content, PATH, seen_as(content))
        return
    check_one_format(content, PATH, seen_as(content))


def test_a_jpeg_of_several_pictures_is_a_jpeg() -> None:
    picture = Image.new("RGB", (8, 8))
    content = saved(picture, "MPO", save_all=True, append_images=[picture])
    check_one_format(content, PATH, seen_as(content))
