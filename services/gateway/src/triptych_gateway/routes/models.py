"""GET /v1/models: what the registered instances serve."""

import time
from typing import Any

from fastapi import APIRouter, Request

from triptych_common.domain.errors import RequestError
from triptych_gateway.access.auth import ApiKeys
from triptych_gateway.routing.registry_view import RegistryView


def model_routes(api_keys: ApiKeys, view: RegistryView) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def card(model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": created, "owned_by": "triptych"}

    @router.get("/v1/models")
    async def list_models(request: Request) -> dict[str, Any]:
        api_keys.check_key(request.headers.get("authorization"))
        return {"object": "list", "data": [card(model) for model in view.models]}

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str, request: Request) -> dict[str, Any]:
        api_keys.check_key(request.headers.get("authorization"))
        if model not in view.models:
            raise RequestError(404, "model_not_found", f"the model {model[:200]!r} does not exist", "model")
        return card(model)

    return router
