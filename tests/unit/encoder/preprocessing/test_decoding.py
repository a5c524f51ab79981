"""The encoder decodes the image that the gateway saw, as vLLM would, or nothing. Real Pillow and vLLM."""

import errno
import io
import random
from typing import Any

import pytest
from PIL import Image, ImageOps
from vllm.multimodal import image as vllm_image
from vllm.multimodal.media.image import ImageMediaIO

from tests.support.hostile import chunks
from tests.support.hostile.images import FORMATS, HostileImage, hostile_images, saved
from triptych_common.domain.jpeg_scans import MAX_JPEG_SCANS
from triptych_common.domain.media_bounds import DecodingBounds
from triptych_common.protocol.messages import ImageProperties
from triptych_encoder.encoding import BadMediaError, PreprocessFailedError
from triptych_encoder.preprocessing.media_decoders import ImageDecoder
from triptych_vllm_connector.decoding.processes import DecodeProcesses

DECODER = ImageDecoder(FORMATS, 64_000_000, DecodeProcesses(DecodingBounds()))
PICTURE = saved(Image.effect_noise((56, 28), 80).convert("RGB"), "PNG")
JPEG = saved(Image.new("RGB", (8, 8), (200, 10, 10)), "JPEG")


def seen(content: bytes) -> ImageProperties:
    """What a gateway would see."""
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        image_format = "JPEG" if image.format == "MPO" else str(image.format)
        return ImageProperties(format=image_format, width=image.size[0], height=image.size[1])


def readable() -> list[HostileImage]:
    """Those whose header can be read, the large ones left out: they take seconds."""
    found = []
    for each in hostile_images(PICTURE):
        try:
            properties = seen(each.content)
        except Exception:  # noqa: S112 -- whatever cannot be opened is no case of this test
            continue
        if properties.num_pixels <= 1_000_000:
            found.append(each)
    return found


@pytest.mark.parametrize("each", readable(), ids=lambda each: each.name)
@pytest.mark.parametrize("options", [{}, {"image_mode": "L"}, {"rgba_background_color": [0, 0, 9]}], ids=str)
def test_pixels_are_vllms_to_the_bit(
    each: HostileImage, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = seen(each.content)
    monkeypatch.setattr(vllm_image, "ALLOWED_IMAGE_FORMATS", (properties.format,))
    try:
        expected = ImageMediaIO(**{"image_mode": "RGB", **options}).load_bytes(each.content)
    except Exception:
        with pytest.raises(BadMediaError):
            DECODER.decode(each.content, properties, options)
        return
    got = DECODER.decode(each.content, properties, options)
    assert (got.media.mode, got.media.size) == (expected.media.mode, expected.media.size)
    assert got.media.tobytes() == expected.media.tobytes()
    assert (got.original_bytes, got.io_config) == (expected.original_bytes, expected.io_config)


@pytest.mark.parametrize(
    "properties",
    [
        ImageProperties(format="FLI", width=64, height=64),
        ImageProperties(format="PSD", width=8, height=8),
        ImageProperties(format="PNG", width=8_001, height=8_000),
        None,
    ],
    ids=str,
)
def test_what_no_gateway_would_order_is_refused(properties: ImageProperties | None) -> None:
    with pytest.raises(BadMediaError):
        DECODER.check(properties)


@pytest.mark.parametrize(
    ("content", "properties"),
    [
        (JPEG, ImageProperties(format="PNG", width=8, height=8)),
        (JPEG, ImageProperties(format="JPEG", width=9, height=8)),
        (PICTURE, ImageProperties(format="JPEG", width=56, height=28)),
    ],
    ids=["other format", "other size", "format of other bytes"],
)
def test_another_image_than_the_gateway_saw_is_not_decoded(
    content: bytes, properties: ImageProperties, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(BadMediaError):
        DECODER.decode(content, properties, {})


def test_no_other_decoder_is_reached() -> None:
    """As an FLI, which vLLM's own reader takes it for, the file has 64 x 64 pixels."""
    both = chunks.jpeg_that_is_fli(JPEG, 64)
    with vllm_image.open_image(io.BytesIO(both)) as image:
        assert (image.format, image.size) == ("FLI", (64, 64))
    assert DECODER.decode(both, seen(both), {}).media.size == (8, 8)


def test_a_jpeg_of_too_many_scans_is_refused_before_the_first() -> None:
    picture = saved(Image.new("RGB", (64, 64)), "JPEG", progressive=True)
    num_scans = picture.count(b"\xff\xda")
    at_most = chunks.scan_bomb(picture, MAX_JPEG_SCANS - num_scans)
    assert DECODER.decode(at_most, seen(at_most), {}).media.size == (64, 64)
    more = chunks.scan_bomb(picture, MAX_JPEG_SCANS - num_scans + 1)
    with pytest.raises(BadMediaError, match="scans"):
        DECODER.decode(more, seen(more), {})


def test_what_follows_the_image_is_no_scan() -> None:
    """A photograph with a video behind it."""
    with_video = JPEG + random.Random(1).randbytes(8 << 20) + b"\xff\xda" * (MAX_JPEG_SCANS + 1)
    assert DECODER.decode(with_video, seen(with_video), {}).media.size == (8, 8)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "no memory"),
        OSError(errno.EMFILE, "too many files"),
        OSError("out of memory error when reading image file"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("place", ["load", "transpose"])
def test_lack_of_memory_is_no_fault_of_the_image(
    error: Exception, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    if place == "load":
        monkeypatch.setattr(Image, "open", fail)
    else:
        monkeypatch.setattr(ImageOps, "exif_transpose", fail)
    with pytest.raises(PreprocessFailedError) as caught:
        DECODER.decode(PICTURE, seen_before(), {})
    assert str(error) not in str(caught.value) or not str(error)


def seen_before() -> ImageProperties:
    return ImageProperties(format="PNG", width=56, height=28)


def test_a_librarys_text_stays_in_the_log() -> None:
    cut = PICTURE[: len(PICTURE) // 2]
    with pytest.raises(BadMediaError) as caught:
        DECODER.decode(cut, seen(cut), {})
    assert str(caught.value) == "the bytes are not an image that can be decoded"
    assert caught.value.__cause__ is not None
