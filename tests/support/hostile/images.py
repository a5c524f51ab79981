"""Eighty-odd images that are cut off, oversized, of two formats, or merely rare."""

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image

from tests.support.hostile import chunks
from triptych_common.runtime.media_settings import IMAGE_FORMATS

SIDE = 56
FORMATS = IMAGE_FORMATS
ORIENTATION = 0x0112  # the EXIF tag
CUTS = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class HostileImage:
    name: str
    content: bytes


def hostile_images(picture: bytes) -> list[HostileImage]:
    """Made of `picture`, a PNG that the model can read."""
    with Image.open(io.BytesIO(picture)) as opened:
        base = opened.convert("RGB")
    made = [*_rare(base), *_thin(), *_cut_off(base), *_bombs(base), *_two_formats(base), *_not_images(base)]
    return [HostileImage(name, content) for name, content in made]


def saved(image: Image.Image, image_format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def _rare(base: Image.Image) -> Iterator[tuple[str, bytes]]:
    """Readable, and each in a way of its own."""
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        yield f"jpeg orientation {orientation}", saved(base, "JPEG", exif=exif, quality=95)
    inverted = Image.eval(base, lambda value: 255 - value)
    frames = {"save_all": True, "append_images": [inverted], "duration": 10}
    yield "gif animated", saved(base, "GIF", **frames)
    yield "webp animated", saved(base, "WEBP", lossless=True, **frames)
    yield "png animated", saved(base, "PNG", **frames)
    yield "mpo", saved(base, "MPO", save_all=True, append_images=[inverted])
    yield "jpeg cmyk", saved(base.convert("CMYK"), "JPEG", quality=95)
    yield "jpeg gray", saved(base.convert("L"), "JPEG", quality=95)
    yield "jpeg progressive", saved(base, "JPEG", progressive=True, quality=95)
    yield "jpeg broken exif", saved(base, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + bytes(40))
    yield "png 16 bit gray", saved(base.convert("L").convert("I;16"), "PNG")
    yield "png 16 bit rgb", _png_16_bit(base)
    yield "png interlaced", chunks.interlaced_png(*base.size, base.tobytes())
    yield "png 1 bit", saved(base.convert("1"), "PNG")
    yield "png palette", saved(base.quantize(16), "PNG")
    yield "png palette transparent", saved(base.quantize(16), "PNG", transparency=0)
    yield "png gray alpha", saved(base.convert("LA"), "PNG")
    half = base.convert("RGBA")
    half.putalpha(128)
    yield "png alpha", saved(half, "PNG")
    yield "png rgb transparent color", saved(base, "PNG", transparency=(0, 0, 0))
    yield "webp alpha", saved(half, "WEBP", lossless=True)
    yield "gif transparent", saved(base.quantize(16), "GIF", transparency=0)
    yield "bmp palette", saved(base.quantize(16), "BMP")
    yield "bmp alpha", saved(half, "BMP")
    # Copies: Pillow keeps what the encoder of an earlier format was told.
    pages = {"save_all": True, "append_images": [inverted.copy(), half.copy()]}
    for compression in ("raw", "packbits", "tiff_lzw", "tiff_adobe_deflate", "jpeg"):
        yield f"tiff {compression}", saved(base, "TIFF", compression=compression)
    yield "tiff group4", saved(base.convert("1"), "TIFF", compression="group4")
    yield "tiff of several pages", saved(base.copy(), "TIFF", **pages)
    yield "avif", saved(base, "AVIF", quality=90)
    yield "avif animated", saved(base, "AVIF", **frames)
    yield "jpeg 2000", saved(base, "JPEG2000")
    yield "jpeg 2000 codestream", saved(base, "JPEG2000", no_jp2=True)
    yield "ppm", saved(base, "PPM")
    yield "ppm gray", saved(base.convert("L"), "PPM")
    yield "ppm plain", b"P3 3 2 255 " + b"1 2 3 " * 6
    yield (
        "ppm of six bits",
        b"P6 %d %d 63\n" % base.size + Image.eval(base, lambda value: value // 4).tobytes(),
    )
    yield "qoi", saved(base, "QOI")
    yield "icon", saved(base, "ICO")
    yield "icon of bitmaps", saved(base, "ICO", bitmap_format="bmp")
    yield "tga", saved(base, "TGA")
    yield "tga rle alpha", saved(half, "TGA", compression="tga_rle")
    yield "png with html behind", saved(base, "PNG") + b"<script>alert(1)</script>"
    yield "gif with zip behind", saved(base, "GIF") + b"PK\x05\x06" + bytes(18)
    yield (
        "jpeg many comments",
        b"\xff\xd8" + chunks.jpeg_segment(0xFE, bytes(60_000)) * 20 + saved(base, "JPEG")[2:],
    )


def _thin() -> Iterator[tuple[str, bytes]]:
    for image_format in FORMATS:
        pixel = saved(Image.new("RGB", (1, 1), (9, 9, 9)), image_format, sizes=[(1, 1)])  # of an icon
        yield f"{image_format.lower()} of one pixel", pixel
    yield "jpeg 65500 wide", saved(Image.new("L", (65_500, 1)), "JPEG")
    yield "jpeg 65500 high", saved(Image.new("L", (1, 65_500)), "JPEG")
    yield "png 65500 wide", saved(Image.new("1", (65_500, 40)), "PNG")
    yield "jpeg 65500 wide and high enough", saved(Image.new("L", (65_500, 400), 80), "JPEG", quality=5)
    yield "png aspect 199", saved(Image.new("L", (199 * 8, 8), 80), "PNG")
    yield "png aspect 201", saved(Image.new("L", (201 * 8, 8), 80), "PNG")


def _cut_off(base: Image.Image) -> Iterator[tuple[str, bytes]]:
    for image_format in FORMATS:
        whole = saved(base, image_format)
        for cut in CUTS:
            yield f"{image_format.lower()} cut at {cut:.0%}", whole[: int(len(whole) * cut)]


def _bombs(base: Image.Image) -> Iterator[tuple[str, bytes]]:
    yield "png header bomb", chunks.png(30_000, 30_000, [])
    yield "png of 31 million pixels in 115 bytes", chunks.png(5_600, 5_600, [bytes(3 * 5_600)])
    small = saved(base, "JPEG")
    frame = small.index(b"\xff\xc0") + 5
    yield "jpeg header bomb", small[:frame] + struct.pack(">HH", 65_000, 65_000) + small[frame + 4 :]
    yield "gif header bomb", b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + bytes(3) + b";"
    yield "gif frame larger than its screen", _gif_with_large_frame()
    bmp = bytearray(saved(base, "BMP"))
    struct.pack_into("<ii", bmp, 18, 60_000, 60_000)
    yield "bmp header bomb", bytes(bmp)
    yield "bmp 2 million wide", chunks.bmp_header(2_000_000, 1)
    yield "png 2 million high", chunks.png(1, 2_000_000, [])
    text = b"k\0\0" + zlib.compress(bytes(8 << 20), 9)
    yield "png text bomb", _png_with(base, chunks.png_chunk(b"zTXt", text))
    profile = b"p\0\0" + zlib.compress(bytes(8 << 20), 9)
    yield "png profile bomb", _png_with(base, chunks.png_chunk(b"iCCP", profile))
    large = saved(Image.new("RGB", (2_000, 2_000), (90, 90, 90)), "JPEG", progressive=True)
    yield "jpeg of 2000 scans", chunks.scan_bomb(large, 2_000)
    yield "jpeg empty segments", b"\xff\xd8" + b"\xff\xe5\0\x02" * 20_000 + small[2:]


def _two_formats(base: Image.Image) -> Iterator[tuple[str, bytes]]:
    jpeg = saved(Image.new("RGB", (8, 8), (200, 10, 10)), "JPEG")
    yield "jpeg and fli", chunks.jpeg_that_is_fli(jpeg, 13_377)
    yield "jpeg and small fli", chunks.jpeg_that_is_fli(jpeg, 64)
    yield "jpeg and gbr", chunks.jpeg_that_is_gbr(jpeg)
    yield "png and pcd", chunks.png_that_is_pcd(base.tobytes(), *base.size)


def _not_images(base: Image.Image) -> Iterator[tuple[str, bytes]]:
    yield "nothing", b""
    yield "one byte", b"\x89"
    yield "svg", b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
    yield "pdf", b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n"
    yield "jpeg 2000 signature", b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(64)


def _png_16_bit(base: Image.Image) -> bytes:
    wide = b"".join(bytes((value, value)) for value in base.tobytes())
    row = 6 * base.width
    return chunks.png(*base.size, [wide[row * y :][:row] for y in range(base.height)], depth=16)


def _png_with(base: Image.Image, extra: bytes) -> bytes:
    pixels, row = base.tobytes(), 3 * base.width
    return chunks.png(*base.size, [pixels[row * y :][:row] for y in range(base.height)], extra=extra)


def _gif_with_large_frame() -> bytes:
    """A screen of one pixel, a frame of 60000 x 60000."""
    screen = b"GIF89a" + struct.pack("<HH", 1, 1) + bytes(3)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 60_000, 60_000, 0)
    return screen + frame + b"\x02\x02\x4c\x01\0;"
