"""Index of stored responses: records in Redis that every gateway writes and reads."""

import asyncio
import re
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

from pydantic import ValidationError

from triptych_common.coordination import StoredResponses
from triptych_common.domain.errors import BusUnavailableError, RequestError
from triptych_common.protocol.messages import InstanceRecord
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.access.callers import Caller
from triptych_gateway.chat.upstream import RESPONSE_PARAM
from triptych_gateway.errors import unavailable
from triptych_gateway.responses.response_record import ResponseRecord
from triptych_gateway.routing.registry_view import RegistryView

log = get_logger(__name__)

REDIS_TIMEOUT_S = 2.0
REFRESH_LIMIT_S = 2.0  # beyond the view's own interval
MAX_ID_CHARS = 100  # of an id that a caller sends, in messages
_ID = re.compile(r"resp_[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class FoundResponse:
    """Response that its caller may read, and the instance that has it."""

    record: ResponseRecord
    instance: InstanceRecord


class ResponseIndex:
    """Index of one gateway's callers."""

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
            with suppress(TimeoutError):
                async with asyncio.timeout(self._view.interval_s + REFRESH_LIMIT_S):
                    await self._view.wait_for_refresh()
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
                if (each.instance, each.boot_id) == (record.instance, record.boot_id) and not each.draining
            ),
            None,
        )


def new_response_id() -> str:
    """Return a new id that cannot be guessed."""
    return f"resp_{uuid4().hex}"


def response_not_found(response_id: str) -> RequestError:
    """Return the 404 in vLLM's words."""
    message = f"Response with id '{response_id[:MAX_ID_CHARS]}' not found."
    return RequestError(404, "response_not_found", message, RESPONSE_PARAM)
