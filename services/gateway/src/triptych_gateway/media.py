"""Media intake: each item of a request becomes checked bytes with their identity (mm_hash).

Decoding base64, reading the image's header and hashing take milliseconds for large media, so they
run in a small pool of threads. Pixels are never decoded here: that is the encoder's work.
"""

import asyncio
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

from PIL import Image

from triptych_common.domain.errors import RequestError
from triptych_common.domain.hashing import mm_hash
from triptych_common.protocol.ids import MmHash
from triptych_gateway.content_parts import MediaPart
from triptych_gateway.data_url import decode_data_url


@dataclass(frozen=True, slots=True)
class MediaLimits:
    max_item_bytes: int
    max_image_pixels: int
    image_formats: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakenItem:
    """One media item, checked and named. `content` is shared by items of equal bytes."""

    part: MediaPart
    mm_hash: MmHash
    content: bytes = field(repr=False)
    processor_options: Mapping[str, Any]
    media_io_options: Mapping[str, Any]  # this item's modality only, not keyed by it


async def take_media(
    parts: Sequence[MediaPart],
    *,
    namespace_digest: str,
    processor_options: Mapping[str, Any],
    media_io_options: Mapping[str, Mapping[str, Any]],
    limits: MediaLimits,
    threads: Executor,
    on_taken: Callable[[MediaPart], None],
) -> tuple[TakenItem, ...]:
    """Take every item of a request, one after the other.

    Args:
        on_taken: called after each, so that its text is not held beside its bytes.
        media_io_options: by modality, as in the request's `media_io_kwargs`.

    Raises:
        RequestError: 400 or 413 naming the first item that is refused.
    """
    loop = asyncio.get_running_loop()

    def take(part: MediaPart) -> TakenItem:
        content = decode_data_url(part.url, part.path, limits.max_item_bytes)
        check_image(content, part.path, limits)
        io_options = media_io_options.get(part.modality, {})
        try:
            identity = mm_hash(
                modality=part.modality,
                media=content,
                namespace_digest=namespace_digest,
                processor_options=processor_options,
                media_io_options=io_options,
            )
        except TypeError as error:
            raise RequestError(
                400,
                "invalid_value",
                "mm_processor_kwargs and media_io_kwargs must be plain JSON",
                "mm_processor_kwargs",
            ) from error
        return TakenItem(part, identity, content, processor_options, io_options)

    taken: list[TakenItem] = []
    contents: dict[MmHash, bytes] = {}
    for part in parts:
        item = await loop.run_in_executor(threads, take, part)
        taken.append(replace(item, content=contents.setdefault(item.mm_hash, item.content)))
        on_taken(part)
    return tuple(taken)


def check_image(content: bytes, path: str, limits: MediaLimits) -> None:
    """Read the header only: is it an image of an accepted format and of a size that may be decoded?

    Raises:
        RequestError: 400 not an image; 413 too many pixels.
    """
    try:
        with Image.open(io.BytesIO(content), formats=limits.image_formats) as image:
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels(path, limits) from error
    except Exception as error:  # hostile bytes make header parsers fail in many ways; all mean the same
        names = ", ".join(limits.image_formats)
        raise RequestError(
            400, "invalid_image", f"{path} is not an image that can be read ({names})", path
        ) from error
    if width < 1 or height < 1:
        raise RequestError(400, "invalid_image", f"{path} is an image without pixels", path)
    if width * height > limits.max_image_pixels:
        raise _too_many_pixels(path, limits)


def _too_many_pixels(path: str, limits: MediaLimits) -> RequestError:
    return RequestError(
        413, "image_too_large", f"{path} has more than {limits.max_image_pixels} pixels", path
    )


def quiet_pillow() -> None:
    """Our own limit on pixels is the one that counts; Pillow's warning would only repeat it."""
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
