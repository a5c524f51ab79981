"""Routes of /ui, off unless enabled. `ui.live_view` decides what each caller sees."""

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from triptych_common.domain.errors import RequestError
from triptych_gateway.access.auth import Caller
from triptych_gateway.endpoints.local_endpoints import UI_EVENTS, UI_FILE, UI_PAGE, UI_SNAPSHOT
from triptych_gateway.gateway import Gateway
from triptych_gateway.routes.local import add_route
from triptych_gateway.tracing.recent_requests import RecentRequests
from triptych_gateway.ui.live_view import PAGE, PAGE_HEADERS, EventStream, LiveView, read_page_files
from triptych_gateway.ui.system_view import SystemView


def ui_routes(gateway: Gateway) -> APIRouter:
    """Return the routes of the page; without recent requests it is not enabled."""
    router, recents, system = APIRouter(), gateway.services.recents, SystemView(gateway)
    page_files = {} if recents is None else read_page_files()

    def enabled() -> RecentRequests:
        if recents is None:
            raise RequestError(404, "ui_not_enabled", "the page at /ui is not enabled")
        return recents

    def caller_of(request: Request) -> Caller:
        return gateway.services.access.api_keys.check_key(request.headers.get("authorization"))

    async def file_of_page(file: str) -> Response:
        enabled()
        if file not in page_files:
            raise RequestError(404, "not_found", "the page has no such file")
        found = page_files[file]
        return Response(found.content, headers={**PAGE_HEADERS, "Content-Type": found.media_type})

    async def page() -> Response:
        return await file_of_page(PAGE)

    async def snapshot(request: Request) -> Response:
        view = LiveView(caller_of(request), enabled(), system)
        async with system.store.hold():
            content = orjson.dumps(await view.snapshot())
        return Response(content, media_type="application/json", headers={"Cache-Control": "no-store"})

    async def events(request: Request) -> Response:
        caller = caller_of(request)
        return EventStream(
            LiveView(caller, enabled(), system),
            is_over=lambda: gateway.registration.record.draining,
            has_rights=lambda: caller_of(request).sees_as(caller),
        )

    add_route(router, UI_PAGE, page)
    add_route(router, UI_FILE, file_of_page)
    add_route(router, UI_SNAPSHOT, snapshot)
    add_route(router, UI_EVENTS, events)
    return router
