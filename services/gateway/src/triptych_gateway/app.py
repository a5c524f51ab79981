"""The FastAPI application of one gateway."""

from fastapi import FastAPI

from triptych_gateway.gateway import Gateway
from triptych_gateway.openai_errors import install_error_handlers
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
    app.include_router(chat_routes(gateway))
    app.include_router(model_routes(gateway))
    app.include_router(health_routes(gateway))
    app.include_router(media_routes(gateway))
    return app
