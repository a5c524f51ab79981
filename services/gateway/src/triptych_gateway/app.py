"""ASGI application of one gateway: forwarded paths, and a FastAPI application for all others."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych_gateway.endpoints.endpoint import Endpoint, EndpointKind
from triptych_gateway.endpoints.table import FORWARDED
from triptych_gateway.errors import install_error_handlers
from triptych_gateway.gateway import Gateway
from triptych_gateway.proxy.exchange import AudioExchange, ChatExchange, Exchange, TextExchange
from triptych_gateway.responses.exchange import ResponseExchange, StoredExchange
from triptych_gateway.routes.docs import docs_routes
from triptych_gateway.routes.files import file_routes
from triptych_gateway.routes.health import health_routes
from triptych_gateway.routes.media import media_routes
from triptych_gateway.routes.models import model_routes
from triptych_gateway.routes.ui import ui_routes

OpenExchange = Callable[[Scope, Receive, Send], Exchange[Any]]
API_PATHS = "/v1/"
MAX_AGE_S = 600  # that a browser need not ask again
READABLE_HEADERS = (
    "X-Request-Id",
    "Request-Id",
    "Retry-After",
    *(
        f"x-ratelimit-{part}-{rate}"
        for part in ("limit", "remaining", "reset")
        for rate in ("requests", "tokens")
    ),
)


class ForwardedApp:
    def __init__(self, endpoint: Endpoint, open_exchange: OpenExchange) -> None:
        self.endpoint = endpoint
        self._open_exchange = open_exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._open_exchange(scope, receive, send).run()


def _exchange_of(endpoint: Endpoint, gateway: Gateway) -> OpenExchange:
    """Return what opens the exchange of a request to a forwarded endpoint."""
    services, responses = gateway.services, gateway.responses
    if endpoint.kind is EndpointKind.STORED:
        return partial(StoredExchange, endpoint, services, responses)
    if endpoint.kind is EndpointKind.RESPONSE:
        return partial(ResponseExchange, endpoint, services, responses)
    if endpoint.kind is EndpointKind.SOUND:
        return partial(AudioExchange, endpoint, services)
    return partial(ChatExchange if endpoint.takes_media else TextExchange, endpoint, services)


class ForwardedFirst:
    """ASGI application that passes forwarded requests to `apps`, and all others to `others`.

    No framework stands between the server and a forwarded request, whose layers would cost time; only paths
    with parameters go through `others`.
    """

    def __init__(self, apps: Sequence[ForwardedApp], others: ASGIApp) -> None:
        self._apps = {(method, app.endpoint.path): app for app in apps for method in app.endpoint.methods}
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._others
        if scope["type"] == "http":
            app = self._apps.get((scope["method"], scope["path"]), app)
        await app(scope, receive, send)


class CrossOrigin:
    """ASGI application around `app` that lets pages call the API, not metrics and health.

    Keys are shown by a header that a page sets itself. Browsers send no credentials of their own.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        """Store the origins: `https://app.example.org`, or `*` for all."""
        self._app = app
        self._api = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=READABLE_HEADERS,
            max_age=MAX_AGE_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["type"] == "http" and scope["path"].startswith(API_PATHS)
        await (self._api if is_api else self._app)(scope, receive, send)


def create_app(gateway: Gateway) -> ASGIApp:
    """Build routes and error format around a running `gateway` (see `run_gateway`)."""
    app = FastAPI(
        title="Triptych gateway", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    install_error_handlers(app)
    app.include_router(model_routes(gateway.services))
    app.include_router(file_routes(gateway.services))
    app.include_router(health_routes(gateway))
    app.include_router(docs_routes())
    app.include_router(ui_routes(gateway))
    app.include_router(media_routes(gateway))
    apps = [ForwardedApp(endpoint, _exchange_of(endpoint, gateway)) for endpoint in FORWARDED]
    for each in apps:  # other methods: 405
        route = Route(each.endpoint.path, each, methods=list(each.endpoint.methods))
        route.methods = set(each.endpoint.methods)  # Starlette adds HEAD
        app.router.routes.append(route)
    served = ForwardedFirst(apps, app)
    origins = gateway.settings.cors_origins
    return CrossOrigin(served, origins) if origins else served
