"""Image headers: format and size. Pixels are never decoded here.

A header may be as long as the file, made of millions of tiny parts. So Pillow reads it through a reader
that counts: an image whose header costs more than any camera's is refused.

Where one read or a C library takes in a header whole, its parts are counted before: chunks, tags, boxes.

What is read here goes on to the encoder with the job: it decodes that format and that size, or refuses.
"""

import io
import math
import struct
import time
import warnings
from dataclasses import dataclass
from typing import Self

from PIL import Image, TiffImagePlugin

from triptych_common.domain.errors import RequestError
from triptych_common.domain.jpeg_scans import MAX_JPEG_SCANS, has_too_many_scans
from triptych_common.protocol.messages import MAX_IMAGE_SIDE, ImageProperties

# A photograph with a megabyte of EXIF, XMP and colour profile takes a few hundred reads, and a millisecond.
MAX_READS = 8_000
MAX_CPU_S = 0.1  # of the thread: a busy machine does not make an image worse
READS_PER_LOOK = 8  # at the clock
MAX_EXIF_BYTES = 256 << 10  # a JPEG's is parsed as a whole, entry by entry
EXIF_START = b"Exif\x00\x00"
ICON_START = b"\0\0\1\0"
AVIF_BRANDS = (b"avif", b"avis", b"mif1", b"msf1")  # that Pillow's reader takes
MAX_WEBP_CHUNKS = 20_000  # every frame of an animation is one
# Of a TIFF's tags that say how pixels lie: Pillow makes an object of each value. Two for each strip.
MAX_TIFF_TAG_BYTES = 256 << 10
BIG_TIFF = 43
TIFF_DESCRIPTION, TIFF_OTHERS = 270, 600  # a long text; no tag beyond says anything of the pixels
# Of AVIF's and JPEG 2000's boxes, without those that hold pixels and profiles: libavif looks for each item
# among all others, ten seconds for 60,000, and Pillow's loop over the boxes of a JP2 reads from memory.
MAX_BOX_BYTES = 16 << 10
OPAQUE_BOX_BYTES = 32  # that one which nobody looks into counts as
PARENT_BOXES = {b"meta": 4, b"iprp": 0, b"ipco": 0, b"jp2h": 0}  # -> bytes before the boxes in it
OPAQUE_BOXES = frozenset({b"mdat", b"idat", b"colr", b"jp2c", b"free", b"skip", b"uuid", b"xml "})


@dataclass(frozen=True, slots=True)
class ImageLimits:
    max_pixels: int
    formats: tuple[str, ...]  # names of Pillow's formats


@dataclass(frozen=True, slots=True)
class ImageHeader:
    format: str  # the one of `ImageLimits.formats` that opened it
    width: int  # pixels
    height: int

    @classmethod
    def of(cls, properties: ImageProperties) -> Self:
        return cls(properties.format, properties.width, properties.height)

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
        name, width, height = _read_bounded(content, limits.formats)
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


def _read_bounded(content: bytes, formats: tuple[str, ...]) -> tuple[str, int, int]:
    """Return format, width and height. Parsers raise whatever they like about a stranger's bytes."""
    start = content[:16]
    if start[:4] == b"RIFF":
        _check_webp_chunks(content)
    elif start[:2] in (b"II", b"MM"):
        _check_tiff_tags(content)
    elif start[4:8] in (b"ftyp", b"jP  "):
        _check_boxes(content)
    if "AVIF" in formats and start[4:8] == b"ftyp" and start[8:12] in AVIF_BRANDS:
        return "AVIF", *_avif_size(content)
    if "ICO" in formats and start[:4] == ICON_START:
        return "ICO", *_icon_size(content)
    with Image.open(_HeaderReader(content), formats=formats) as image:
        # A JPEG of several pictures is opened by the JPEG reader, which calls it MPO.
        return "JPEG" if image.format == "MPO" else str(image.format), *image.size


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


def _check_tiff_tags(content: bytes) -> None:
    """Read the tags of a TIFF's first page, as Pillow reads them first; it has parsed none of them then.

    Raises:
        _CostlyHeaderError: there are too many values.
    """
    reader = _HeaderReader(content)
    head = reader.read(8)
    tags = TiffImagePlugin.ImageFileDirectory_v2(head + reader.read(8) if head[2] == BIG_TIFF else head)
    reader.seek(tags.next)
    tags.load(reader)
    data = tags._tagdata  # noqa: SLF001 -- what `tags` returns is parsed
    sizes = (len(data[tag]) for tag in data if tag < TIFF_OTHERS and tag != TIFF_DESCRIPTION)
    if sum(sizes) > MAX_TIFF_TAG_BYTES:
        raise _CostlyHeaderError


def _check_boxes(content: bytes) -> None:
    """Count the bytes of the boxes that an AVIF's or a JPEG 2000's reader looks into.

    Raises:
        _CostlyHeaderError: there are too many.
    """
    bytes_left = MAX_BOX_BYTES
    spans = [(0, len(content))]
    while spans:
        at, end = spans.pop()
        while at + 8 <= end:
            num_bytes, kind = struct.unpack_from(">I4s", content, at)
            head = 8
            if num_bytes == 1 and at + 16 <= end:
                (num_bytes,), head = struct.unpack_from(">Q", content, at + 8), 16
            num_bytes = num_bytes or end - at  # 0: to the end
            if num_bytes < head:
                break  # no reader goes on either
            is_parent = kind in PARENT_BOXES
            if is_parent:
                spans.append((at + head + PARENT_BOXES[kind], min(at + num_bytes, end)))
            is_opaque = is_parent or kind in OPAQUE_BOXES
            bytes_left -= min(num_bytes, OPAQUE_BOX_BYTES) if is_opaque else num_bytes
            if bytes_left < 0:
                raise _CostlyHeaderError
            at += num_bytes


def _avif_size(content: bytes) -> tuple[int, int]:
    """Return the size without Pillow's reader, which writes EXIF data of any size anew."""
    from PIL import _avif  # noqa: PLC0415 -- a Pillow of the operator's own build may lack it

    size, _, _, _, exif, _, _ = _avif.AvifDecoder(content, "auto", 1).get_info()
    if exif is not None and len(exif) > MAX_EXIF_BYTES:
        raise _CostlyHeaderError
    return size  # type: ignore[no-any-return]


def _icon_size(content: bytes) -> tuple[int, int]:
    """Return the size of the icon that Pillow chooses, which decodes it to open it: a PNG or a DIB."""
    (num_icons,) = struct.unpack_from("<H", content, 4)
    icons: list[tuple[int, int, int]] = []
    for at in range(6, 6 + 16 * num_icons, 16):
        width, height, num_colors, _, _, depth, _, offset = struct.unpack_from("<4B2H2I", content, at)
        depth = depth or (num_colors and math.ceil(math.log2(num_colors))) or 256
        icons.append((-(width or 256) * (height or 256), depth, offset))
    *_, offset = min(icons, key=lambda icon: icon[:2])
    with Image.open(_HeaderReader(content[offset:]), formats=("PNG", "DIB")) as image:
        width, height = image.size
        return width, height if image.format == "PNG" else height // 2  # a mask is below the picture


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
