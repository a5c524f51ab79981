"""Images of a few pixels whose headers are as long as the file, and honest ones with large metadata."""

import io
import struct
import zlib
from collections.abc import Callable

from PIL import Image

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


HONEST: tuple[Callable[[], bytes], ...] = (
    jpeg_with_large_metadata,
    png_with_large_metadata,
    webp_animation,
    gif_with_profile,
)
