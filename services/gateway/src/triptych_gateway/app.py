"""ASGI application of one gateway: forwarded paths, and a FastAPI application for all others."""

from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp

from triptych_gateway.access.cors import CrossOrigin
from triptych_gateway.errors import install_error_handlers
from triptych_gateway.gateway import Gateway
from triptych_gateway.routes.docs import docs_routes
from triptych_gateway.routes.files import file_routes
from triptych_gateway.routes.forwarded import ForwardedFirst, forwarded_apps
from triptych_gateway.routes.health import health_routes
from triptych_gateway.routes.media import media_routes
from triptych_gateway.routes.models import model_routes
from triptych_gateway.routes.ui import ui_routes
from triptych_gateway.ui.store_reader import StoreReader
from triptych_gateway.ui.system_view import SystemView


def create_app(gateway: Gateway) -> ASGIApp:
    """Build routes and error format around a running `gateway` (see `run_gateway`)."""
    app = FastAPI(
        title="Triptych gateway", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    install_error_handlers(app)
    chat, view = gateway.chat, gateway.view
    app.include_router(model_routes(chat.api_keys, chat.instances))
    app.include_router(file_routes(gateway.files, chat))
    app.include_router(
        health_routes(view, gateway.registration, chat.limiter, chat.metrics, gateway.stream_lags)
    )
    app.include_router(docs_routes())
    app.include_router(ui_routes(chat.recents, chat.api_keys, gateway.registration, _system_view(gateway)))
    max_sends = gateway.settings.max_media_sends
    app.include_router(media_routes(gateway.media_cache, gateway.orders, max_sends))
    apps = forwarded_apps(chat, gateway.responses)
    for each in apps:  # other methods: 405
        route = Route(each.endpoint.path, each, methods=list(each.endpoint.methods))
        route.methods = set(each.endpoint.methods)  # Starlette adds HEAD
        app.router.routes.append(route)
    served = ForwardedFirst(apps, app)
    origins = gateway.settings.cors_origins
    return CrossOrigin(served, origins) if origins else served


def _system_view(gateway: Gateway) -> SystemView:
    return SystemView(
        registration=gateway.registration,
        view=gateway.view,
        router=gateway.router,
        limiter=gateway.chat.limiter,
        max_requests=gateway.settings.max_requests_in_flight,
        sizes=gateway.orders.sizes,
        stream_lags=gateway.stream_lags,
        store=StoreReader(gateway.settings.store_socket, f"{gateway.settings.instance}/ui"),
    )
