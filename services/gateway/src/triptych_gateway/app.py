"""The FastAPI application of one gateway."""

from fastapi import FastAPI

from triptych_gateway.errors import install_error_handlers
from triptych_gateway.gateway import Gateway
from triptych_gateway.routes.chat import chat_routes
from triptych_gateway.routes.health import health_routes
from triptych_gateway.routes.media import media_routes
from triptych_gateway.routes.models import model_routes


def create_app(gateway: Gateway) -> FastAPI:
    """Routes and error format around a running `gateway` (see `run_gateway`)."""
    app = FastAPI(
        title="Triptych gateway", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    install_error_handlers(app)
    chat, view = gateway.chat, gateway.view
    app.include_router(chat_routes(chat))
    app.include_router(model_routes(chat.api_keys, view))
    app.include_router(health_routes(view, gateway.registration, chat.limiter, chat.metrics))
    app.include_router(media_routes(gateway.media_cache))
    return app
