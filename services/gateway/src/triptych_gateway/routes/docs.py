"""/openapi.json and /docs, both made from the table of endpoints, once."""

from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files
from string import Template

import orjson
from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from triptych_common import release
from triptych_gateway.endpoints.endpoint import Endpoint
from triptych_gateway.endpoints.local_endpoints import DOCS, OPENAPI
from triptych_gateway.endpoints.openapi import ABOUT, TITLE, describe_api
from triptych_gateway.endpoints.table import ENDPOINTS
from triptych_gateway.routes.local import add_route

# The page needs its own style, and nothing else.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def render_page(endpoints: Iterable[Endpoint], version: str) -> str:
    """Return the page of `endpoints`, in sections by tag, in the order of first appearance."""
    by_tag: dict[str, list[Endpoint]] = {}
    for endpoint in endpoints:
        by_tag.setdefault(endpoint.tag, []).append(endpoint)
    return _template().substitute(
        title=escape(TITLE),
        version=escape(version),
        about=escape(ABOUT),
        sections="\n".join(_section(tag, each) for tag, each in by_tag.items()),
    )


def _section(tag: str, endpoints: list[Endpoint]) -> str:
    rows = "\n".join(map(_row, endpoints))
    head = "<tr><th>endpoint</th><th>what</th><th>fields</th></tr>"
    return f"<h2>{escape(tag)}</h2>\n<table>\n{head}\n{rows}\n</table>"


def _row(endpoint: Endpoint) -> str:
    traits = {"key": endpoint.needs_key, "media": endpoint.takes_media, "streams": endpoint.streams}
    notes = ", ".join(name for name, is_so in traits.items() if is_so)
    names = [*({} if endpoint.body is None else endpoint.body.model_fields), *endpoint.passed_fields]
    shown = ", ".join(f"<code>{escape(name)}</code>" for name in dict.fromkeys(names))
    path = f"{' '.join(endpoint.methods)} {endpoint.shown_path}"
    what = escape(endpoint.summary) + (f" <small>({notes})</small>" if notes else "")
    return f"<tr><td><code>{escape(path)}</code></td><td>{what}</td><td>{shown}</td></tr>"


@cache
def _template() -> Template:
    return Template(files(__package__).joinpath("docs_page.html").read_text())


def docs_routes() -> APIRouter:
    router = APIRouter()
    version = release()
    description = _document(version)
    page = render_page(ENDPOINTS, version)

    async def openapi() -> Response:
        return Response(description, media_type="application/json")

    async def docs() -> Response:
        return HTMLResponse(page, headers=PAGE_HEADERS)

    add_route(router, OPENAPI, openapi)
    add_route(router, DOCS, docs)
    return router


@cache
def _document(version: str) -> bytes:
    """Return the API's description, which takes a tenth of a second to make."""
    return orjson.dumps(describe_api(ENDPOINTS, version))
