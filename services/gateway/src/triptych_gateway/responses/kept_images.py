"""Bytes of images of stored responses, in this gateway's memory: as many as there is room for.

A response can be continued while the encoder's output is in the store, or the image's bytes are here or in an
uploaded file. Otherwise the caller gets an error.
"""

from concurrent.futures import Executor
from functools import partial

from cachetools import LRUCache

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import Modality
from triptych_gateway.access.callers import Caller
from triptych_gateway.files.file_service import FileService
from triptych_gateway.request.image_header import ImageHeader
from triptych_gateway.request.known_file import KnownFile
from triptych_gateway.responses.response_record import ResponseImage

PREVIOUS_FIELD = "previous_response_id"


class KeptImages:
    """Kept images of one gateway; the least recently used are dropped."""

    def __init__(self, max_bytes: int, files: FileService | None, threads: Executor) -> None:
        self._kept: LRUCache[str, bytes] = LRUCache(max_bytes, getsizeof=len)  # by the bytes' digest
        self._files = files
        self._threads = threads

    def keep(self, media_digest: str, content: bytes) -> None:
        if len(content) <= self._kept.maxsize:
            self._kept[media_digest] = content

    async def find(self, image: ResponseImage, caller: Caller, response_id: str) -> KnownFile:
        """Return the image as a file. Its bytes are read only if the store has lost its output."""
        content = self._kept.get(image.media_digest)
        if content is None and image.file_id is not None and self._files is not None:
            file = await self._files.find_file(caller, image.file_id)
            if file is not None:
                return file
        properties = image.image
        return KnownFile(
            image.file_id or image.media_digest,
            image.num_bytes,
            image.media_digest,
            (Modality.IMAGE,),
            ImageHeader(properties.format, properties.width, properties.height),
            partial(_read, content, response_id),
            self._threads,
        )


def _read(content: bytes | None, response_id: str) -> bytes:
    if content is None:
        message = f"an image of the response {response_id!r} is no longer kept: send the conversation again"
        raise RequestError(404, "response_image_gone", message, PREVIOUS_FIELD)
    return content
