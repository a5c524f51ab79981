"""vLLM's own image reader, held to the formats that an operator allows."""

import io

import pytest
from PIL import Image
from vllm.multimodal import image as vllm_image
from vllm.multimodal.media.image import ImageMediaIO

from tests.support.hostile.chunks import jpeg_that_is_fli
from tests.support.hostile.images import saved
from triptych_vllm_connector.host.image_reader import read_image_formats_only

JPEG = saved(Image.new("RGB", (8, 8), (200, 10, 10)), "JPEG")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_image, "ALLOWED_IMAGE_FORMATS", vllm_image.ALLOWED_IMAGE_FORMATS)


def test_other_decoders_are_not_reached() -> None:
    both = jpeg_that_is_fli(JPEG, 64)
    with vllm_image.open_image(io.BytesIO(both)) as image:
        assert image.format == "FLI"
    read_image_formats_only(("PNG", "JPEG"))
    assert ImageMediaIO().load_bytes(both).media.size == (8, 8)
    with pytest.raises(ValueError, match="cannot identify"):
        ImageMediaIO().load_bytes(saved(Image.new("RGB", (8, 8)), "BMP"))


def test_a_vllm_that_keeps_its_list_elsewhere_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_image, "ALLOWED_IMAGE_FORMATS", None)
    with pytest.raises(TypeError):
        read_image_formats_only(("PNG",))
