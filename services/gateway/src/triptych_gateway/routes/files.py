"""/v1/files: upload, list, retrieve, delete, content; in OpenAI's form."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych_common.telemetry.logs import get_logger
from triptych_gateway.access.auth import Caller
from triptych_gateway.access.request_limiter import RequestLimiter
from triptych_gateway.endpoints.local_endpoints import (
    DELETE_FILE,
    FILE_CONTENT,
    GET_FILE,
    LIST_FILES,
    UPLOAD_FILE,
)
from triptych_gateway.files.file_record import FileRecord, ListQuery
from triptych_gateway.files.file_service import FileService, files_not_enabled
from triptych_gateway.proxy.exchange import CLIENT_CLOSED_REQUEST
from triptych_gateway.proxy.services import Services
from triptych_gateway.race import Guard
from triptych_gateway.routes.local import add_route

log = get_logger(__name__)


class ContentResponse(Response):
    """Answer with a file's bytes, read as the client takes them."""

    def __init__(
        self,
        files: FileService,
        limiter: RequestLimiter,
        caller: Caller,
        record: FileRecord,
        timeout_s: float,
    ) -> None:
        """Store the file; the download ends when the client reads nothing for `timeout_s`."""
        headers = {
            "Content-Length": str(record.num_bytes),
            "Content-Disposition": "attachment",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        super().__init__(headers=headers, media_type="application/octet-stream")
        self._limiter = limiter
        self._files, self._caller, self._record, self._timeout_s = files, caller, record, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._limiter.hold_request():
            await self._send(send)

    async def _send(self, send: Send) -> None:
        async with self._files.content_of(self._caller, self._record) as pieces:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            try:
                async for piece in pieces:
                    async with asyncio.timeout(self._timeout_s):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            except (OSError, TimeoutError):
                log.info("client does not read", file_id=self._record.file_id)


def file_routes(services: Services) -> APIRouter:
    """Return the routes of files; without a directory of files they answer that none is set."""
    router, limiter, files = APIRouter(), services.access.limiter, services.media.files

    def admit(request: Request) -> tuple[FileService, Caller]:
        caller = services.access.api_keys.check_key(request.headers.get("authorization"))
        if files is None:
            raise files_not_enabled()
        return files, caller

    async def upload(request: Request) -> Any:
        service, caller = admit(request)
        try:
            with limiter.hold_request(), Guard() as guard, services.cut_off.hold(guard):
                return await service.upload(caller, request.scope, request.receive, guard)
        except ClientDisconnect:
            services.metrics.disconnects.inc()
            log.info("client went away", **caller.fields)
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def list_files(request: Request) -> dict[str, Any]:
        service, caller = admit(request)
        with limiter.hold_request():
            return await service.list_files(caller, ListQuery.parse(request.query_params))

    async def retrieve(file_id: str, request: Request) -> dict[str, Any]:
        service, caller = admit(request)
        with limiter.hold_request():
            return (await service.retrieve(caller, file_id)).as_object()

    async def delete(file_id: str, request: Request) -> dict[str, Any]:
        service, caller = admit(request)
        with limiter.hold_request():
            return await service.delete(caller, file_id)

    async def content(file_id: str, request: Request) -> Response:
        service, caller = admit(request)
        with limiter.hold_request():
            record = await service.retrieve(caller, file_id)
        return ContentResponse(service, limiter, caller, record, services.settings.chunk_timeout_s)

    add_route(router, UPLOAD_FILE, upload)
    add_route(router, LIST_FILES, list_files)
    add_route(router, GET_FILE, retrieve)
    add_route(router, DELETE_FILE, delete)
    add_route(router, FILE_CONTENT, content)
    return router
