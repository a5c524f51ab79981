"""Decodes images: exactly the image that the gateway saw, or nothing.

The format and the size come with the job. Only that format's decoder is tried, and the size is compared
before it runs, so that bytes which are another image for another decoder are refused.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from PIL import Image
from vllm.multimodal.media.base import MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO

from triptych_common.domain.jpeg_scans import MAX_JPEG_SCANS, has_too_many_scans
from triptych_common.domain.transient import is_transient
from triptych_common.protocol.messages import ImageProperties
from triptych_encoder.encoding import BadMediaError, PreprocessFailedError
from triptych_vllm_connector.decoding.images import upright
from triptych_vllm_connector.decoding.processes import DecodeProcesses, MediaRefusedError
from triptych_vllm_connector.host.image_reader import decoded_apart

_NAMES = {"MPO": "JPEG"}  # a JPEG of several pictures, as its reader calls it


@contextlib.contextmanager
def decoding(what: str) -> Iterator[None]:
    """Translate a decoder's errors, which may be of any type for a caller's bytes.

    Raises:
        BadMediaError: the bytes are to blame.
        PreprocessFailedError: this machine could not do it, now.
    """
    try:
        yield
    except BadMediaError:
        raise
    except MediaRefusedError as error:
        raise BadMediaError(str(error)) from error
    except Exception as error:
        if is_transient(error):
            raise PreprocessFailedError(f"the encoder had no resources to decode {what}") from error
        raise BadMediaError(f"the bytes are not {what} that can be decoded") from error


@dataclass(frozen=True, slots=True)
class ImageDecoder:
    """Decodes within the encoder's own `formats` and `max_pixels`, which a job cannot extend."""

    formats: Collection[str]
    max_pixels: int
    processes: DecodeProcesses  # for images that a thread should not decode

    def check(self, image: ImageProperties | None) -> ImageProperties:
        """Properties of the job's image, if it may be decoded.

        Raises:
            BadMediaError: an image of that format, or of that size, is not decoded here.
        """
        if image is None:
            raise BadMediaError("the job does not say which image the gateway saw")
        if image.format not in self.formats:
            raise BadMediaError("images of this format are not decoded")
        if image.num_pixels > self.max_pixels:
            raise BadMediaError(f"the image has more than {self.max_pixels} pixels")
        return image

    def decode(
        self, media: bytes, image: ImageProperties, options: Mapping[str, Any]
    ) -> MediaWithBytes[Image.Image]:
        """Decode to the pixels that vLLM's own server would make, bit for bit. Blocks.

        Args:
            options: the request's `media_io_kwargs` for images.

        Raises:
            BadMediaError: the bytes are not that image, or cannot be decoded.
            PreprocessFailedError: this machine could not do it, now.
        """
        with decoding("an image"):
            return _decode(media, image, options, self.processes)


def _decode(
    media: bytes, properties: ImageProperties, options: Mapping[str, Any], processes: DecodeProcesses
) -> MediaWithBytes[Image.Image]:
    if properties.format == "JPEG" and has_too_many_scans(media):
        raise BadMediaError(f"the image has more than {MAX_JPEG_SCANS} scans")
    reader = ImageMediaIO(**{"image_mode": "RGB", **options})
    with Image.open(BytesIO(media), formats=(properties.format,)) as opened:
        found = (_NAMES.get(str(opened.format), opened.format), *opened.size)
        if found != (properties.format, properties.width, properties.height):
            raise BadMediaError("the image is not the one that the gateway saw")
        image = decoded_apart(opened, media, processes) or upright(opened)
        image.load()
    converted = reader._convert_image_mode(image)
    io_config = None
    if converted is not image:
        io_config = {"image_mode": reader.image_mode, "rgba_background_color": reader.rgba_background_color}
    return MediaWithBytes(converted, media, io_config)
