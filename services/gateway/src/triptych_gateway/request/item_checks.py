"""Checks that an item is what its part says, by first bytes and headers; nothing is decoded here.

An image's header is read and goes on with the job. Video and audio are known by the first bytes of their
container, so that no play list reaches a media framework; the encoder checks their length.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from PIL import Image, SpiderImagePlugin

from triptych_common.domain.containers import AUDIO_CONTAINERS, VIDEO_CONTAINERS, container_of
from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import Modality
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.data_url import check_decoded, decode_base64, decode_data_url
from triptych_gateway.request.image_header import ImageHeader, ImageLimits, read_image_header

PREFIX_BYTES = 16  # as much as Pillow gives to those tests
PCD_SIGNATURE = (2048, b"PCD_")  # Pillow's reader has no test of the first bytes
SPIDER_FLOATS = 27  # its header, in either order of bytes; likewise
NO_CURSORS = b"\0\0\2\0\0\0"  # a file of no cursors is none; most of TGA's begin so


def check_one_format(content: bytes, path: str, image_format: str) -> None:
    """Refuse `content`, opened as `image_format`, if another reader would take it too.

    Every reader of Pillow's has a test of the first bytes, or a signature elsewhere. A file that passes the
    one of another format than it was opened with is refused: other software would show another image.

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
        if accepts is not None and accepts(prefix) and not (name == "CUR" and prefix[:6] == NO_CURSORS):
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


_CONTAINERS = {Modality.VIDEO: VIDEO_CONTAINERS, Modality.AUDIO: AUDIO_CONTAINERS}


@dataclass(frozen=True, slots=True)
class MediaLimits:
    max_item_bytes: int
    image: ImageLimits
    video_piece_rows: int = 0  # the fewest of a piece; 0: no video is divided


def bytes_of(part: MediaPart, max_bytes: int) -> bytes:
    """Return the bytes of an item in the request itself.

    Raises:
        RequestError: 400, or 413 when the media are larger than `max_bytes`.
    """
    if part.content is not None:
        return check_decoded(part.content, part.url, part.path, part.modality, max_bytes)
    if part.is_base64:
        return decode_base64(part.url, 0, part.path, part.modality, max_bytes)
    return decode_data_url(part.url, part.path, part.modality, max_bytes)


def check_media(part: MediaPart, content: bytes, limits: MediaLimits) -> ImageHeader | None:
    """Check an item; return an image's header, else None. Raises RequestError: 400 or 413 naming the part."""
    if part.modality is Modality.IMAGE:
        image = read_image_header(content, part.path, limits.image)
        check_one_format(content, part.path, image.format)
        return image
    known = _CONTAINERS[part.modality]
    if container_of(content, known) is None:
        message = f"{part.path} is not {part.modality} of a known format: {', '.join(known)}"
        raise RequestError(400, f"invalid_{part.modality}", message, part.path)
    return None


def check_counts(parts: Iterable[MediaPart], limits: Mapping[Modality, int]) -> None:
    """Check the counts before anything is fetched or encoded.

    Raises:
        RequestError: 400 naming the first part that is not taken.
    """
    if not limits:
        return
    counts: Counter[Modality] = Counter()
    for part in parts:
        limit = limits.get(part.modality, 0)
        counts[part.modality] += 1
        if not limit:
            message = f"{part.path}: the model takes no {part.modality}, only {', '.join(sorted(limits))}"
            raise RequestError(400, "unsupported_media", message, part.path)
        if counts[part.modality] > limit:
            message = f"{part.path}: a request may hold {limit} items of type {part.modality} at most"
            raise RequestError(400, "too_many_items", message, part.path)
