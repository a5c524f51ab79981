"""Media intake: each item of a request becomes checked bytes with their identity (mm_hash).

Decoding base64, reading the image's header and hashing take milliseconds for large media, so they
run in a small pool of threads. Pixels are never decoded here: that is the encoder's work.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_common.domain.hashing import mm_hash
from triptych_common.domain.transient import is_transient
from triptych_common.protocol.ids import MmHash
from triptych_gateway.errors import unavailable
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.data_url import decode_data_url
from triptych_gateway.request.image_header import ImageHeader, ImageLimits, read_image_header
from triptych_gateway.request.polyglots import check_one_format


@dataclass(frozen=True, slots=True)
class MediaLimits:
    max_item_bytes: int
    image: ImageLimits


@dataclass(frozen=True, slots=True)
class TakenItem:
    """One media item, checked and named. `content` is shared by items of equal bytes."""

    part: MediaPart
    mm_hash: MmHash
    content: bytes = field(repr=False)
    image: ImageHeader
    processor_options: Mapping[str, Any]
    media_io_options: Mapping[str, Any]  # this item's modality only, not keyed by it


@dataclass(frozen=True, slots=True)
class MediaIntake:
    """One per gateway."""

    limits: MediaLimits
    threads: Executor

    async def take_items(self, request: ChatRequest, namespace_digest: str) -> tuple[TakenItem, ...]:
        """Take every item of `request`, one after the other. No text is held beside its bytes for long.

        Raises:
            RequestError: 400 or 413 naming the first item that is refused; 503 for want of memory or files.
        """
        loop = asyncio.get_running_loop()
        taken: list[TakenItem] = []
        contents: dict[MmHash, bytes] = {}
        for part in request.media:
            item = await loop.run_in_executor(self.threads, self._take, part, request, namespace_digest)
            taken.append(replace(item, content=contents.setdefault(item.mm_hash, item.content)))
            request.drop_text(part)
        return tuple(taken)

    def _take(self, part: MediaPart, request: ChatRequest, namespace_digest: str) -> TakenItem:
        try:
            return self._check(part, request, namespace_digest)
        except Exception as error:
            if is_transient(error):
                message = f"{part.path} cannot be read just now"
                raise unavailable("no_resources", message, part.path) from error
            raise

    def _check(self, part: MediaPart, request: ChatRequest, namespace_digest: str) -> TakenItem:
        content = decode_data_url(part.url, part.path, self.limits.max_item_bytes)
        image = read_image_header(content, part.path, self.limits.image)
        check_one_format(content, part.path, image.format)
        io_options = request.media_io_options.get(part.modality, {})
        try:
            identity = mm_hash(
                modality=part.modality,
                media=content,
                namespace_digest=namespace_digest,
                processor_options=request.processor_options,
                media_io_options=io_options,
                tenant_salt=request.tenant_salt,
            )
        except TypeError as error:
            message = "mm_processor_kwargs and media_io_kwargs must be plain JSON"
            raise RequestError(400, "invalid_value", message, "mm_processor_kwargs") from error
        return TakenItem(part, identity, content, image, request.processor_options, io_options)
