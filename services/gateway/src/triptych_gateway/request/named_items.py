"""Items by a caller's `uuid`, as in vLLM: a part without media names what was sent with it before.

    uuid and media    the item has this name from now on, for all gateways
    uuid alone        the item that has the name; when its tensor is gone it must be sent whole

A name belongs to a tenant, or to an API key without one, and to one kind of media. Bytes are not kept for it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, PositiveInt, StringConstraints, ValidationError

from triptych_common.coordination import ItemNames
from triptych_common.domain.errors import BusUnavailableError, RequestError
from triptych_common.domain.hashing import item_name
from triptych_common.protocol.messages import ImageProperties, Modality
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.errors import unavailable
from triptych_gateway.request.content_parts import KnownFile, MediaPart
from triptych_gateway.request.image_header import ImageHeader

log = get_logger(__name__)

REDIS_TIMEOUT_S = 2.0
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class MediaFacts(BaseModel):
    """Facts about an item's bytes that stand for them."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # a later release may have written it

    media_digest: Digest
    num_bytes: PositiveInt
    image: ImageProperties | None = None

    def as_file(
        self, file_id: str, modality: Modality, read: Callable[[], bytes], threads: Executor
    ) -> KnownFile:
        """Return the item as a file; `read` is as in `KnownFile`."""
        header = None if self.image is None else ImageHeader.of(self.image)
        return KnownFile(file_id, self.num_bytes, self.media_digest, (modality,), header, read, threads)


@dataclass(frozen=True, slots=True)
class NamedItems:
    """Named items of one gateway's callers."""

    names: ItemNames
    threads: Executor

    async def exchange(self, owner: str, parts: Sequence[MediaPart], sent: Mapping[int, MediaFacts]) -> None:
        """Name the items that were sent, by item index, and find those of parts that are names alone.

        Without Redis nothing is named, and the request goes on if it brings all of its media.

        Args:
            owner: `Caller.flow`: of the tenant, or of the API key.

        Raises:
            RequestError: 400, the first part whose item is unknown; 503, Redis is away.
        """
        named = [(part, part.uuid) for part in parts if part.uuid is not None]
        records = [
            (item_name(part.modality, uuid), None if part.is_name else _dump(sent[part.item_index]))
            for part, uuid in named
        ]
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                found = await self.names.exchange(owner, records)
        except (BusUnavailableError, TimeoutError) as error:
            path = next((part.path for part, _ in named if part.is_name), None)
            if path is None:
                log.warning("names of items not recorded", error=repr(error))
                return
            message = "items cannot be looked up by uuid: the control plane cannot be reached"
            raise unavailable("bus_unavailable", message, path) from error
        for (part, _), record in zip(named, found, strict=True):
            if part.is_name:
                part.file = self._file_of(record, part)

    def _file_of(self, record: bytes | None, part: MediaPart) -> KnownFile:
        def read() -> bytes:
            raise unknown_item(part.path)

        if record is None:
            raise unknown_item(part.path)
        try:
            facts = MediaFacts.model_validate_json(record)
        except ValidationError as error:
            log.warning("record of a named item not readable", path=part.path)
            raise unknown_item(part.path) from error
        return facts.as_file(facts.media_digest, part.modality, read, self.threads)


def unknown_item(path: str) -> RequestError:
    """Return the 400 for an item of which neither name, tensor nor bytes are left."""
    return RequestError(400, "unknown_item", "no item is known by this uuid: send it whole", path)


def _dump(facts: MediaFacts) -> bytes:
    return facts.model_dump_json(exclude_defaults=True).encode()
