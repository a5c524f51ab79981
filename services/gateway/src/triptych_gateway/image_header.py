"""The header of an image: of which format it is, and how large. Pixels are never decoded here.

What is read here goes on to the encoder with the job: it decodes that format and that size, or refuses.
"""

import io
import warnings
from dataclasses import dataclass

from PIL import Image

from triptych_common.domain.errors import RequestError


@dataclass(frozen=True, slots=True)
class ImageLimits:
    max_pixels: int
    formats: tuple[str, ...]  # names of Pillow's formats


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What an image says of itself."""

    format: str  # the one of `ImageLimits.formats` that opened it
    width: int  # pixels
    height: int


def read_image_header(content: bytes, path: str, limits: ImageLimits) -> ImageHeader:
    """Read the header only: is it an image of an accepted format and of a size that may be decoded?

    Raises:
        RequestError: 400 not an image; 413 too many pixels.
    """
    try:
        with Image.open(io.BytesIO(content), formats=limits.formats) as image:
            width, height = image.size
            # A JPEG of several pictures is opened by the JPEG reader, which calls it MPO.
            name = "JPEG" if image.format == "MPO" else str(image.format)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels(path, limits) from error
    except Exception as error:  # hostile bytes make header parsers fail in many ways; all mean the same
        names = ", ".join(limits.formats)
        raise RequestError(
            400, "invalid_image", f"{path} is not an image that can be read ({names})", path
        ) from error
    if width < 1 or height < 1:
        raise RequestError(400, "invalid_image", f"{path} is an image without pixels", path)
    if width * height > limits.max_pixels:
        raise _too_many_pixels(path, limits)
    return ImageHeader(name, width, height)


def _too_many_pixels(path: str, limits: ImageLimits) -> RequestError:
    return RequestError(413, "image_too_large", f"{path} has more than {limits.max_pixels} pixels", path)


def quiet_pillow() -> None:
    """Our own limit on pixels is the one that counts; Pillow's warning would only repeat it."""
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
