"""The ASGI application of one gateway: chat completions, and a FastAPI application for all else."""

from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp

from triptych_gateway.errors import install_error_handlers
from triptych_gateway.gateway import Gateway
from triptych_gateway.routes.chat import CHAT_PATH, ChatApp, ChatFirst
from triptych_gateway.routes.files import file_routes
from triptych_gateway.routes.health import health_routes
from triptych_gateway.routes.media import media_routes
from triptych_gateway.routes.models import model_routes


def create_app(gateway: Gateway) -> ASGIApp:
    """Routes and error format around a running `gateway` (see `run_gateway`)."""
    app = FastAPI(
        title="Triptych gateway", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    install_error_handlers(app)
    chat, view = gateway.chat, gateway.view
    app.include_router(model_routes(chat.api_keys, view))
    app.include_router(file_routes(gateway.files, chat))
    app.include_router(
        health_routes(view, gateway.registration, chat.limiter, chat.metrics, gateway.stream_lags)
    )
    max_sends = gateway.settings.max_media_sends
    app.include_router(media_routes(gateway.media_cache, gateway.orders, max_sends))
    chat_app = ChatApp(chat)
    app.router.routes.append(Route(CHAT_PATH, chat_app, methods=["POST"]))  # other methods: 405
    return ChatFirst(chat_app, app)
