"""ASGI application of one gateway: forwarded paths, and a FastAPI application for all others."""

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych_gateway.errors import install_error_handlers
from triptych_gateway.gateway import Gateway
from triptych_gateway.routes.docs import docs_routes
from triptych_gateway.routes.files import file_routes
from triptych_gateway.routes.forwarded import ForwardedFirst, forwarded_apps
from triptych_gateway.routes.health import health_routes
from triptych_gateway.routes.media import media_routes
from triptych_gateway.routes.models import model_routes
from triptych_gateway.routes.ui import ui_routes

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
    apps = forwarded_apps(gateway.services, gateway.responses)
    for each in apps:  # other methods: 405
        route = Route(each.endpoint.path, each, methods=list(each.endpoint.methods))
        route.methods = set(each.endpoint.methods)  # Starlette adds HEAD
        app.router.routes.append(route)
    served = ForwardedFirst(apps, app)
    origins = gateway.settings.cors_origins
    return CrossOrigin(served, origins) if origins else served
