"""PNG, BMP and JPEG files put together by hand: what no library would write."""

import struct
import zlib
from collections.abc import Iterable, Sequence

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""(first column, first row, step of columns, step of rows) of each pass."""


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(
    width: int,
    height: int,
    rows: Iterable[bytes],
    *,
    depth: int = 8,
    color_type: int = 2,
    interlaced: bool = False,
    extra: bytes = b"",
) -> bytes:
    """A PNG of these unfiltered rows; `extra`: chunks between header and pixels."""
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, int(interlaced))
    data = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    return (
        PNG_SIGNATURE
        + png_chunk(b"IHDR", header)
        + extra
        + png_chunk(b"IDAT", data)
        + png_chunk(b"IEND", b"")
    )


def interlaced_png(width: int, height: int, pixels: bytes) -> bytes:
    """RGB pixels in the seven passes of Adam7."""
    rows: list[bytes] = []
    for first_x, first_y, step_x, step_y in ADAM7:
        for y in range(first_y, height, step_y):
            columns: Sequence[int] = range(first_x, width, step_x)
            if columns:
                rows.append(b"".join(pixels[3 * (y * width + x) :][:3] for x in columns))
    return png(width, height, rows, interlaced=True)


def bmp_header(width: int, height: int) -> bytes:
    """The header of a BMP of 24 bits per pixel: the whole file has 54 bytes."""
    num_bytes = 14 + 40
    return (
        b"BM"
        + struct.pack("<IHHI", num_bytes, 0, 0, num_bytes)
        + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    )


def jpeg_segment(marker: int, payload: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def jpeg_that_is_fli(jpeg: bytes, side: int) -> bytes:
    """A JPEG whose first segment is the header of an FLI animation of `side` x `side` pixels.

    The segment's length, 0x11AF, is FLI's signature read from the other end.
    """
    segment = bytearray(2 + 2 + 0x11AF)
    segment[0:6] = b"\xff\xd8\xff\xe0\x11\xaf"
    struct.pack_into("<HHHHH", segment, 6, 1, side, side, 8, 0)  # frames, width, height, depth, flags
    return bytes(segment) + jpeg[2:]


def jpeg_that_is_gbr(jpeg: bytes) -> bytes:
    """A JPEG that begins like a brush of GIMP's: version 1 stands where an empty segment is."""
    return b"\xff\xd8\xff\xe0" + struct.pack(">I", 1) + jpeg[2:]


def png_that_is_pcd(pixels: bytes, width: int, height: int) -> bytes:
    """A PNG with the signature of a Photo CD where that has it, 2048 bytes from the start."""
    padding = 2048 - len(PNG_SIGNATURE) - (12 + 13) - 8
    extra = png_chunk(b"prVt", bytes(padding) + b"PCD_" + bytes(2000))
    rows = [pixels[3 * width * y :][: 3 * width] for y in range(height)]
    return png(width, height, rows, extra=extra)


def scan_bomb(jpeg: bytes, num_scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated: each costs a pass over the whole image."""
    start = jpeg.rindex(b"\xff\xda")
    return jpeg[:-2] + jpeg[start:-2] * num_scans + jpeg[-2:]
