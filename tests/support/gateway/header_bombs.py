"""Images of a few pixels whose headers are as long as the file, and honest ones with large metadata."""

import io
import struct
import zlib
from collections.abc import Callable

from PIL import Image
from PIL.TiffImagePlugin import COLORMAP, EXTRASAMPLES, STRIPOFFSETS, X_RESOLUTION

from tests.support.gateway.samples import image_bytes

SIZE = (6, 5)
NUM_BYTES = 12 << 20


def _jpeg_with(segments: bytes) -> bytes:
    whole = image_bytes(size=SIZE, image_format="JPEG")
    return whole[:2] + segments + whole[2:]


def _png_with(chunks: bytes) -> bytes:
    whole = image_bytes(size=SIZE)
    behind_header = 8 + 25
    return whole[:behind_header] + chunks + whole[behind_header:]


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def jpeg_of_empty_segments() -> bytes:
    return _jpeg_with(_segment(0xE5, b"") * (NUM_BYTES // 4))


def jpeg_of_junk() -> bytes:
    return b"\xff\xd8\xff\xe5\x00\x02" + b"\x00" * NUM_BYTES


def jpeg_of_exif() -> bytes:
    """One EXIF of 12 MiB, over many segments, whose 65,535 entries all point at large data."""
    entries = b"".join(struct.pack("<HHLL", tag, 7, 60_000, 8) for tag in range(65_535))
    exif = b"II*\x00\x08\x00\x00\x00" + struct.pack("<H", 65_535) + entries
    exif += bytes(NUM_BYTES - len(exif))
    pieces = [exif[at : at + 60_000] for at in range(0, len(exif), 60_000)]
    return _jpeg_with(b"".join(_segment(0xE1, b"Exif\x00\x00" + piece) for piece in pieces))


def png_of_small_chunks() -> bytes:
    return _png_with(_png_chunk(b"tEXt", b"k\x00v") * (NUM_BYTES // 15))


def png_of_empty_chunks() -> bytes:
    return _png_with(_png_chunk(b"teSt", b"") * (NUM_BYTES // 12))


def png_of_compressed_text() -> bytes:
    """Each text is a megabyte when it is inflated."""
    text = _png_chunk(b"zTXt", b"k\x00\x00" + zlib.compress(b" " * ((1 << 20) - 1), 9))
    return _png_with(text * (NUM_BYTES // len(text)))


def gif_of_small_blocks() -> bytes:
    whole = image_bytes(size=SIZE, image_format="GIF")
    at = whole.index(b",", 13 + 3 * 2)
    return whole[:at] + b"!\xfe\x01x\x00" * (NUM_BYTES // 5) + whole[at:]


def gif_of_one_long_comment() -> bytes:
    whole = image_bytes(size=SIZE, image_format="GIF")
    at = whole.index(b",", 13 + 3 * 2)
    return whole[:at] + b"!\xfe" + b"\x01x" * (NUM_BYTES // 2) + b"\x00" + whole[at:]


def webp_of_small_chunks() -> bytes:
    """Extended form, as one with metadata has it."""
    plain = image_bytes(size=SIZE, image_format="WEBP")[12:]
    head = struct.pack("<4sIIBBBBBB", b"VP8X", 10, 0, SIZE[0] - 1, 0, 0, SIZE[1] - 1, 0, 0)
    body = b"WEBP" + head + plain + b"teSt\x00\x00\x00\x00" * (NUM_BYTES // 8)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _tiff(tag: int, kind: int, count: int) -> bytes:
    """A TIFF of one byte a pixel, with one more tag whose `count` values are 12 MiB of ones."""
    tags = {256: SIZE[0], 257: SIZE[1], 258: 8, 259: 1, 262: 3, STRIPOFFSETS: 8, 278: 1, COLORMAP: 0}
    entries = {each: struct.pack("<HHLL", each, 4, 1, value) for each, value in tags.items()}
    entries[tag] = struct.pack("<HHLL", tag, kind, count, 8)
    directory = (
        struct.pack("<H", len(entries)) + b"".join(entries[each] for each in sorted(entries)) + bytes(4)
    )
    return b"II*\0" + struct.pack("<L", 8 + NUM_BYTES) + b"\1" * NUM_BYTES + directory


def tiff_of_strips() -> bytes:
    return _tiff(STRIPOFFSETS, 1, NUM_BYTES)


def tiff_of_rationals() -> bytes:
    return _tiff(X_RESOLUTION, 5, NUM_BYTES // 8)


def tiff_of_extra_samples() -> bytes:
    return _tiff(EXTRASAMPLES, 3, NUM_BYTES // 2)


def tiff_of_colors() -> bytes:
    return _tiff(COLORMAP, 1, NUM_BYTES)


def _box(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", 8 + len(data)) + kind + data


def _avif_with(data: bytes) -> bytes:
    """An AVIF with more in the box of its items' properties."""
    whole = image_bytes(size=(64, 64), image_format="AVIF")
    meta, iprp, ipco = (whole.index(kind) - 4 for kind in (b"meta", b"iprp", b"ipco"))
    (num_bytes,) = struct.unpack_from(">I", whole, ipco)
    end = ipco + num_bytes
    grown = bytearray(whole[:end] + data + whole[end:])
    for at in (meta, iprp, ipco):
        (num_bytes,) = struct.unpack_from(">I", grown, at)
        struct.pack_into(">I", grown, at, num_bytes + len(data))
    return bytes(grown)


def avif_of_small_boxes() -> bytes:
    return _avif_with(_box(b"free", b"") * (NUM_BYTES // 8))


def avif_of_profiles() -> bytes:
    return _avif_with(_box(b"colr", b"nclx" + bytes(7)) * (NUM_BYTES // 19))


def avif_of_items() -> bytes:
    """Each of 60,000 items is looked for among all."""
    items = b"".join(struct.pack(">HHH", number, 0, 0) for number in range(1, 60_001))
    handler = _box(b"hdlr", bytes(8) + b"pict" + bytes(13))
    location = _box(b"iloc", struct.pack(">IHH", 0, 0, 60_000) + items)
    return _box(b"ftyp", b"avif" + bytes(4) + b"avifmif1") + _box(b"meta", bytes(4) + handler + location)


def avif_of_exif() -> bytes:
    """Each value is parsed and written again, since the orientation is the image's and not in the data."""
    entries = struct.pack("<HHLL", 0x0112, 3, 1, 6)
    entries += b"".join(struct.pack("<HHLL", tag, 5, 7_000, 8) for tag in range(1_000, 1_020))
    exif = b"II*\0" + struct.pack("<LH", 8, 21) + entries + bytes(7_000 * 8 * 20)
    out = io.BytesIO()
    Image.new("L", SIZE).save(out, "AVIF", exif=exif)
    return out.getvalue()


def jp2_of_small_boxes() -> bytes:
    start = _box(b"jP  ", b"\r\n\x87\n") + _box(b"ftyp", b"jp2 " + bytes(4) + b"jp2 ")
    header = _box(b"ihdr", struct.pack(">IIHBBBB", *SIZE, 1, 7, 7, 0, 0)) + _box(b"teSt", b"") * (
        NUM_BYTES // 8
    )
    return start + _box(b"jp2h", header)


def icon_of_png(png: bytes) -> bytes:
    return struct.pack("<3H4B2H2I", 0, 1, 1, *SIZE, 0, 0, 1, 32, len(png), 22) + png


def icon_of_small_chunks() -> bytes:
    return icon_of_png(png_of_small_chunks())


def ppm_of_one_long_comment() -> bytes:
    return b"P6 #" + b"x" * NUM_BYTES + b"\n%d %d 255\n" % SIZE + bytes(3 * SIZE[0] * SIZE[1])


BOMBS: tuple[Callable[[], bytes], ...] = (
    jpeg_of_empty_segments,
    jpeg_of_junk,
    jpeg_of_exif,
    png_of_small_chunks,
    png_of_empty_chunks,
    png_of_compressed_text,
    gif_of_small_blocks,
    gif_of_one_long_comment,
    webp_of_small_chunks,
    tiff_of_strips,
    tiff_of_rationals,
    tiff_of_extra_samples,
    tiff_of_colors,
    avif_of_small_boxes,
    avif_of_profiles,
    avif_of_items,
    avif_of_exif,
    jp2_of_small_boxes,
    icon_of_small_chunks,
    ppm_of_one_long_comment,
)


def jpeg_with_large_metadata() -> bytes:
    """A megabyte of EXIF, XMP and colour profile in segments of 64 KiB, as editors write them."""
    exif = Image.Exif()
    exif[0x010F], exif[0x0112] = "a camera", 6
    thumbnail = _segment(0xE1, exif.tobytes() + bytes(50_000))
    xmp = _segment(0xE1, b"http://ns.adobe.com/xap/1.0/\x00" + b" " * 60_000) * 2
    profile = [b"ICC_PROFILE\x00" + bytes([at, 14]) + bytes(65_000) for at in range(1, 15)]
    icc = b"".join(_segment(0xE2, piece) for piece in profile)
    return _jpeg_with(thumbnail + xmp + icc)


def png_with_large_metadata() -> bytes:
    texts = b"".join(_png_chunk(b"tEXt", f"key{n}\x00".encode() + b"v" * 9_000) for n in range(60))
    profile = b"icc\x00\x00" + zlib.compress(bytes(500_000))
    return _png_with(_png_chunk(b"iCCP", profile) + texts)


def webp_animation() -> bytes:
    frames = [Image.new("RGB", SIZE, (n, 2 * n, 0)) for n in range(100)]
    out = io.BytesIO()
    frames[0].save(out, "WEBP", save_all=True, append_images=frames[1:], icc_profile=bytes(300_000))
    return out.getvalue()


def gif_with_profile() -> bytes:
    """An application extension of half a megabyte, in blocks of 255 bytes."""
    whole = image_bytes(size=SIZE, image_format="GIF")
    at = whole.index(b",", 13 + 3 * 2)
    blocks = (b"\xff" + bytes(255)) * 2000
    return whole[:at] + b"!\xff\x0bICCRGBG1012" + blocks + b"\x00" + whole[at:]


def tiff_with_large_metadata() -> bytes:
    """A long description, XMP and a profile, as scanners and microscopes write them."""
    out = io.BytesIO()
    tags = {270: "x" * 600_000, 700: b" " * 600_000}
    Image.new("L", SIZE).save(out, "TIFF", icc_profile=bytes(600_000), tiffinfo=tags)
    return out.getvalue()


def avif_with_large_metadata() -> bytes:
    exif, out = Image.Exif(), io.BytesIO()
    exif[0x010F], exif[0x0112] = "a camera" * 5_000, 6
    Image.new("L", SIZE).save(out, "AVIF", exif=exif, xmp=b" " * 200_000, icc_profile=bytes(300_000))
    return out.getvalue()


HONEST: tuple[Callable[[], bytes], ...] = (
    jpeg_with_large_metadata,
    png_with_large_metadata,
    webp_animation,
    gif_with_profile,
    tiff_with_large_metadata,
    avif_with_large_metadata,
)
