"""Selection of images that Pillow decodes in the host, and transport of the others from a child. Without
vLLM."""

from typing import Any

from PIL import Image, ImageOps

from triptych_common.domain.jpeg_scans import MAX_JPEG_SCANS, num_jpeg_scans
from triptych_common.domain.transient import is_transient

# Formats whose decoders take time in proportion to the pixels, and no memory beyond them.
BOUNDED_FORMATS = frozenset({"PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "ICO", "TGA"})
MAX_SCANNED_PIXELS = 256_000_000
"""Pixels times scans of a JPEG that the host decodes, in about two seconds at most."""


def is_bounded(image: Image.Image, media: bytes) -> bool:
    """Return whether decoding `image`, opened from `media`, is short enough for a thread of the host."""
    if image.format not in BOUNDED_FORMATS:
        return False
    num_pixels = image.width * image.height
    is_jpeg = image.format in ("JPEG", "MPO")
    if not is_jpeg or num_pixels * MAX_JPEG_SCANS <= MAX_SCANNED_PIXELS:
        return True
    return num_pixels * num_jpeg_scans(media) <= MAX_SCANNED_PIXELS


def upright(image: Image.Image) -> Image.Image:
    """Turn an image by its EXIF orientation. As vLLM does, an orientation that cannot be read is ignored."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception as error:
        if is_transient(error):
            raise
        return image


def info_of(image: Image.Image) -> tuple[str, bytes, Any]:
    """Return what conversions read beside pixels: mode and bytes of the palette, and the transparency."""
    palette_mode, palette = "", b""
    if image.mode in ("P", "PA") and image.palette is not None:
        palette_mode = image.im.getpalettemode()
        palette = image.im.getpalette(palette_mode, palette_mode)
    return palette_mode, palette, image.info.get("transparency")


def image_of(
    mode: str, size: tuple[int, int], pixels: Any, palette_mode: str, palette: bytes, transparency: Any
) -> Image.Image:
    """Make the image that `info_of` and `Image.tobytes` were asked of; `pixels`: copied.

    Raises:
        ValueError: the pixels are not as many.
    """
    image = Image.frombytes(mode, size, pixels)
    if palette_mode:
        image.putpalette(palette, palette_mode)
    if transparency is not None:
        image.info["transparency"] = transparency
    return image
