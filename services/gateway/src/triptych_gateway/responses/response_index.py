"""Responses that instances store: where each is, and the images that continue it.

The record has no texts: they are in the instance alone.

A response can be continued while the encoder's output is in the store, or the image's bytes are here or in an
uploaded file. Otherwise the caller gets an error.
"""

import asyncio
import re
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from uuid import uuid4

from cachetools import LRUCache
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from triptych_common.coordination import StoredResponses
from triptych_common.domain.errors import BusUnavailableError, RequestError
from triptych_common.protocol.messages import ImageProperties, InstanceRecord, Modality
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.access.auth import Caller
from triptych_gateway.errors import unavailable
from triptych_gateway.files.file_service import FileService
from triptych_gateway.proxy.upstream import RESPONSE_PARAM
from triptych_gateway.request.content_parts import KnownFile
from triptych_gateway.request.named_items import MediaFacts
from triptych_gateway.routing.instances import incarnation_of
from triptych_gateway.routing.registry_view import RegistryView

log = get_logger(__name__)

REDIS_TIMEOUT_S = 2.0
MAX_ID_CHARS = 100  # of an id that a caller sends, in messages
_ID = re.compile(r"resp_[0-9a-f]{32}")
PREVIOUS_FIELD = "previous_response_id"


class ResponseImage(MediaFacts):
    """Image of the conversation up to a response, without its bytes."""

    image: ImageProperties
    file_id: str | None = None  # of an uploaded file


class ResponseRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a later release may have written it

    version: Literal[1] = 1
    instance: str
    boot_id: str  # another life of the instance has forgotten it
    owner: str  # `Caller.owner`
    model: str
    has_events: bool = False  # made in the background as a stream: its events can be read again
    has_raw_media: bool = False  # the instance encodes its images itself, and has them
    images: tuple[ResponseImage, ...] = ()  # that encoders make, in the order of the prompt
    processor_options: Mapping[str, Any] = Field(default_factory=dict)  # of these images
    media_io_options: Mapping[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FoundResponse:
    """Response that its caller may read, and the instance that has it."""

    record: ResponseRecord
    instance: InstanceRecord


class ResponseIndex:
    def __init__(self, stored: StoredResponses, view: RegistryView) -> None:
        self._stored = stored
        self._view = view

    async def find(self, response_id: str, caller: Caller) -> FoundResponse:
        """Find a response of the caller.

        Raises:
            RequestError: 404, there is none, it is another key's, or its instance is gone; 503, Redis is
                away.
        """
        record = await self._read(response_id) if _ID.fullmatch(response_id) else None
        if record is None or record.owner != caller.owner:
            raise response_not_found(response_id)
        instance = self._instance_of(record)
        if instance is None:  # it may be new: another gateway has seen it first
            await self._view.try_refresh()
            instance = self._instance_of(record)
        if instance is None:
            raise response_not_found(response_id)
        return FoundResponse(record, instance)

    async def keep(self, response_id: str, record: ResponseRecord) -> None:
        """Record a response. Without Redis it is not found later, but the answer goes on."""
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                await self._stored.set(response_id, record.model_dump_json(exclude_defaults=True).encode())
        except (BusUnavailableError, TimeoutError) as error:
            log.warning("stored response not recorded", response_id=response_id, error=repr(error))

    async def _read(self, response_id: str) -> ResponseRecord | None:
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                stored = await self._stored.get(response_id)
        except (BusUnavailableError, TimeoutError) as error:
            message = "stored responses cannot be looked up: the control plane cannot be reached"
            raise unavailable("bus_unavailable", message, RESPONSE_PARAM) from error
        if stored is None:
            return None
        try:
            return ResponseRecord.model_validate_json(stored)
        except ValidationError:
            log.warning("record of a stored response not readable", response_id=response_id)
            return None

    def _instance_of(self, record: ResponseRecord) -> InstanceRecord | None:
        return next(
            (
                each
                for each in self._view.instances_of(record.model)
                if incarnation_of(each) == (record.instance, record.boot_id) and not each.draining
            ),
            None,
        )


def new_response_id() -> str:
    return f"resp_{uuid4().hex}"


def response_not_found(response_id: str) -> RequestError:
    """Return the 404 in vLLM's words."""
    message = f"Response with id '{response_id[:MAX_ID_CHARS]}' not found."
    return RequestError(404, "response_not_found", message, RESPONSE_PARAM)


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
        read = partial(_read, content, response_id)
        return image.as_file(image.file_id or image.media_digest, Modality.IMAGE, read, self._threads)


def _read(content: bytes | None, response_id: str) -> bytes:
    if content is None:
        message = f"an image of the response {response_id!r} is no longer kept: send the conversation again"
        raise RequestError(404, "response_image_gone", message, PREVIOUS_FIELD)
    return content
