"""GET /v1/models: what the registered instances serve."""

import time
from typing import Any

from fastapi import APIRouter, Request

from triptych_common.domain.errors import RequestError
from triptych_gateway.gateway import Gateway


def model_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def card(model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": created, "owned_by": "triptych"}

    @router.get("/v1/models")
    async def list_models(request: Request) -> dict[str, Any]:
        gateway.api_keys.check(request.headers.get("authorization"))
        return {"object": "list", "data": [card(model) for model in gateway.view.models]}

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str, request: Request) -> dict[str, Any]:
        gateway.api_keys.check(request.headers.get("authorization"))
        if model not in gateway.view.models:
            raise RequestError(404, "model_not_found", f"the model {model[:200]!r} does not exist", "model")
        return card(model)

    return router
