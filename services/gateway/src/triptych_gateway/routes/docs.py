"""/openapi.json and /docs, both made from the table of endpoints, once."""

import functools

import orjson
from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from triptych_gateway.endpoints.docs_page import PAGE_HEADERS, render_page
from triptych_gateway.endpoints.local_endpoints import DOCS, OPENAPI
from triptych_gateway.endpoints.openapi import describe_api
from triptych_gateway.endpoints.table import ENDPOINTS
from triptych_gateway.routes.health import gateway_version
from triptych_gateway.routes.local import add_route


def docs_routes() -> APIRouter:
    router = APIRouter()
    version = gateway_version()
    description = _document(version)
    page = render_page(ENDPOINTS, version)

    async def openapi() -> Response:
        return Response(description, media_type="application/json")

    async def docs() -> Response:
        return HTMLResponse(page, headers=PAGE_HEADERS)

    add_route(router, OPENAPI, openapi)
    add_route(router, DOCS, docs)
    return router


@functools.cache
def _document(version: str) -> bytes:
    """Return the API's description, which takes a tenth of a second to make."""
    return orjson.dumps(describe_api(ENDPOINTS, version))
