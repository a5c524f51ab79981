"""Polyglots: files that are images of two formats at once, depending on the reader.

Every reader of Pillow's has a test of the first bytes, or a signature elsewhere. A file that passes the one
of another format than it was opened with is refused: other software would show another image.
"""

import struct
from collections.abc import Iterator

from PIL import Image, SpiderImagePlugin

from triptych_common.domain.errors import RequestError

PREFIX_BYTES = 16  # as much as Pillow gives to those tests
PCD_SIGNATURE = (2048, b"PCD_")  # Pillow's reader has no test of the first bytes
SPIDER_FLOATS = 27  # its header, in either order of bytes; likewise


def check_one_format(content: bytes, path: str, image_format: str) -> None:
    """Refuse `content`, opened as `image_format`, if another reader would take it too.

    No reader runs: only their tests of the first bytes.

    Raises:
        RequestError: 400.
    """
    if any(other != image_format for other in _formats_that_accept(content)):
        raise RequestError(400, "invalid_image", f"{path} is an image of two formats at once", path)


def _formats_that_accept(content: bytes) -> Iterator[str]:
    Image.init()  # every reader's test; once
    prefix = content[:PREFIX_BYTES]
    for name, (_, accepts) in Image.OPEN.items():
        if accepts is not None and accepts(prefix):
            yield name
    offset, signature = PCD_SIGNATURE
    if content[offset : offset + len(signature)] == signature:
        yield "PCD"
    if any(_is_spider(content, order) for order in "<>"):
        yield "SPIDER"


def _is_spider(content: bytes, order: str) -> bool:
    header = struct.Struct(f"{order}{SPIDER_FLOATS}f")
    return len(content) >= header.size and bool(
        SpiderImagePlugin.isSpiderHeader(header.unpack(content[: header.size]))
    )
