"""Image headers: format and size. Pixels are never decoded here.

A header may be as long as the file, made of millions of tiny parts. So Pillow reads it through a reader
that counts: an image whose header costs more than any camera's is refused.

What is read here goes on to the encoder with the job: it decodes that format and that size, or refuses.
"""

import io
import time
import warnings
from dataclasses import dataclass

from PIL import Image

from triptych_common.domain.errors import RequestError
from triptych_common.domain.jpeg_scans import MAX_JPEG_SCANS, has_too_many_scans
from triptych_common.protocol.messages import MAX_IMAGE_SIDE, ImageProperties

# A photograph with a megabyte of EXIF, XMP and colour profile takes a few hundred reads, and a millisecond.
MAX_READS = 8_000
MAX_CPU_S = 0.1  # of the thread: a busy machine does not make an image worse
READS_PER_LOOK = 8  # at the clock
MAX_EXIF_BYTES = 256 << 10  # a JPEG's is parsed as a whole, entry by entry
EXIF_START = b"Exif\x00\x00"
MAX_WEBP_CHUNKS = 20_000  # every frame of an animation is one


@dataclass(frozen=True, slots=True)
class ImageLimits:
    max_pixels: int
    formats: tuple[str, ...]  # names of Pillow's formats


@dataclass(frozen=True, slots=True)
class ImageHeader:
    format: str  # the one of `ImageLimits.formats` that opened it
    width: int  # pixels
    height: int

    @property
    def properties(self) -> ImageProperties:
        return ImageProperties(format=self.format, width=self.width, height=self.height)


def read_image_header(content: bytes, path: str, limits: ImageLimits) -> ImageHeader:
    """Read the header of an image of an accepted format and size.

    Takes milliseconds, whatever `content` is; of a JPEG the scans are counted, which takes some per MB.

    Raises:
        RequestError: 400 not an image, or one of too many scans; 413 too many pixels, or a side
            that no job can name.
    """
    try:
        if content[:4] == b"RIFF":
            _check_webp_chunks(content)
        with Image.open(_HeaderReader(content), formats=limits.formats) as image:
            width, height = image.size
            # A JPEG of several pictures is opened by the JPEG reader, which calls it MPO.
            name = "JPEG" if image.format == "MPO" else str(image.format)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels(path, limits) from error
    except Exception as error:  # hostile bytes make header parsers fail in many ways; all mean the same
        names = ", ".join(limits.formats)
        message = f"{path} is not an image that can be read ({names})"
        raise RequestError(400, "invalid_image", message, path) from error
    if width < 1 or height < 1:
        raise RequestError(400, "invalid_image", f"{path} is an image without pixels", path)
    if width * height > limits.max_pixels:
        raise _too_many_pixels(path, limits)
    if max(width, height) > MAX_IMAGE_SIDE:
        message = f"{path} has a side of more than {MAX_IMAGE_SIDE} pixels"
        raise RequestError(413, "image_too_large", message, path)
    if name == "JPEG" and has_too_many_scans(content):
        raise RequestError(400, "invalid_image", f"{path} has more than {MAX_JPEG_SCANS} scans", path)
    return ImageHeader(name, width, height)


class _CostlyHeaderError(Exception):
    """Reading the header would take too long."""


class _HeaderReader(io.BytesIO):
    """Reader for Pillow. Every read is counted, and refused beyond a bound."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._reads_left = MAX_READS
        self._bytes_left = 2 * len(content) + (64 << 10)  # WEBP is read as a whole, others in part
        self._exif_bytes_left = MAX_EXIF_BYTES
        self._end = time.thread_time() + MAX_CPU_S

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self._reads_left -= 1
        self._bytes_left -= len(data)
        if data.startswith(EXIF_START):
            self._exif_bytes_left -= len(data)
        if min(self._reads_left, self._bytes_left, self._exif_bytes_left) < 0:
            raise _CostlyHeaderError
        if self._reads_left % READS_PER_LOOK == 0 and time.thread_time() > self._end:
            raise _CostlyHeaderError
        return data


def _check_webp_chunks(content: bytes) -> None:
    """Count the chunks of a WEBP, whose library gets the whole file instead of a reader.

    Raises:
        _CostlyHeaderError: there are too many.
    """
    position = 12  # behind RIFF, the size, and WEBP
    for _ in range(MAX_WEBP_CHUNKS):
        if position + 8 > len(content):
            return
        num_bytes = int.from_bytes(content[position + 4 : position + 8], "little")
        position += 8 + num_bytes + (num_bytes & 1)
    raise _CostlyHeaderError


def _too_many_pixels(path: str, limits: ImageLimits) -> RequestError:
    return RequestError(413, "image_too_large", f"{path} has more than {limits.max_pixels} pixels", path)


def set_up_pillow(max_pixels: int) -> None:
    """Set Pillow's limits and warnings for this process.

    Its own limit on pixels is set to ours: a WEBP's canvas is allocated when the header is read. Our own
    check is the one that counts, so its warnings would only repeat it; others are about faulty headers,
    one line for each entry of them.
    """
    Image.MAX_IMAGE_PIXELS = (max_pixels + 1) // 2  # above twice as many it raises
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    warnings.filterwarnings("ignore", module=r"PIL\b")
