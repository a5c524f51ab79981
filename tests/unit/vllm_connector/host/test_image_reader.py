"""vLLM's own image reader, held to the formats that an operator allows."""

import io

import pytest
from PIL import Image
from vllm.multimodal import image as vllm_image
from vllm.multimodal.media import image as reader
from vllm.multimodal.media.image import ImageMediaIO

from tests.support.hostile.chunks import jpeg_that_is_fli
from tests.support.hostile.images import saved
from triptych_common.domain.media_bounds import DecodingBounds
from triptych_common.runtime.media_settings import IMAGE_FORMATS
from triptych_vllm_connector.decoding import images
from triptych_vllm_connector.decoding.processes import DecodeProcesses
from triptych_vllm_connector.host.image_reader import read_image_formats_only
from triptych_vllm_connector.seams.replacing import SeamNotFoundError

PROCESSES = DecodeProcesses(DecodingBounds())
JPEG = saved(Image.new("RGB", (8, 8), (200, 10, 10)), "JPEG")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_image, "ALLOWED_IMAGE_FORMATS", vllm_image.ALLOWED_IMAGE_FORMATS)
    monkeypatch.setattr(reader, "open_image", vllm_image.open_image)


def test_other_decoders_are_not_reached() -> None:
    both = jpeg_that_is_fli(JPEG, 64)
    with vllm_image.open_image(io.BytesIO(both)) as image:
        assert image.format == "FLI"
    read_image_formats_only(("PNG", "JPEG"), PROCESSES)
    assert ImageMediaIO().load_bytes(both).media.size == (8, 8)
    with pytest.raises(ValueError, match="cannot identify"):
        ImageMediaIO().load_bytes(saved(Image.new("RGB", (8, 8)), "BMP"))


def test_a_vllm_that_keeps_its_list_elsewhere_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(vllm_image, "ALLOWED_IMAGE_FORMATS")
    with pytest.raises(SeamNotFoundError, match="ALLOWED_IMAGE_FORMATS"):
        read_image_formats_only(("PNG",), PROCESSES)


PICTURE = Image.effect_noise((60, 40), 80)
TURNED = Image.Exif()
TURNED[0x0112] = 6


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F"])
@pytest.mark.parametrize("image_format", ["PNG", *IMAGE_FORMATS[IMAGE_FORMATS.index("TIFF") :]])
def test_pixels_of_a_child_are_vllms_to_the_bit(
    mode: str, image_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formats that are decoded in a child process as a rule, and others if they were."""
    try:
        content = saved(PICTURE.convert("L").convert(mode), image_format, exif=TURNED)
    except (OSError, ValueError):
        pytest.skip(f"{image_format} has no {mode}")
    for options in ({}, {"image_mode": None}, {"image_mode": "RGBA"}):
        expected = ImageMediaIO(**options).load_bytes(content).media
        with monkeypatch.context() as patched:
            patched.setattr(images, "BOUNDED_FORMATS", frozenset())
            read_image_formats_only((image_format,), PROCESSES)
            got = ImageMediaIO(**options).load_bytes(content).media
            patched.setattr(reader, "open_image", vllm_image.open_image)
        assert (got.mode, got.size) == (expected.mode, expected.size)
        assert got.tobytes() == expected.tobytes()


def test_a_palette_with_transparency_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved(PICTURE.convert("RGB").quantize(16), "PNG", transparency=3)
    expected = ImageMediaIO().load_bytes(content).media
    monkeypatch.setattr(images, "BOUNDED_FORMATS", frozenset())
    read_image_formats_only(("PNG",), PROCESSES)
    assert ImageMediaIO().load_bytes(content).media.tobytes() == expected.tobytes()


def test_a_compression_that_is_not_listed_is_refused_by_its_name() -> None:
    content = saved(PICTURE, "TIFF", compression="lzma")
    read_image_formats_only(("TIFF",), PROCESSES)
    with pytest.raises(ValueError, match="compression 'lzma'"):
        ImageMediaIO().load_bytes(content)
