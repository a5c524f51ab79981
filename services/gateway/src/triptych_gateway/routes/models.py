"""/v1/models: what the registered instances serve."""

import time
from typing import Any

from fastapi import APIRouter, Request

from triptych_common.domain.errors import RequestError
from triptych_gateway.access.auth import ApiKeys
from triptych_gateway.endpoints.table import GET_MODEL, LIST_MODELS
from triptych_gateway.routes.local import add_route
from triptych_gateway.routing.registry_view import RegistryView


def model_routes(api_keys: ApiKeys, view: RegistryView) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def card(model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": created, "owned_by": "triptych"}

    async def list_models(request: Request) -> dict[str, Any]:
        api_keys.check_key(request.headers.get("authorization"))
        return {"object": "list", "data": [card(model) for model in view.models]}

    async def get_model(model: str, request: Request) -> dict[str, Any]:
        api_keys.check_key(request.headers.get("authorization"))
        if model not in view.models:
            raise RequestError(404, "model_not_found", f"the model {model[:200]!r} does not exist", "model")
        return card(model)

    add_route(router, LIST_MODELS, list_models)
    add_route(router, GET_MODEL, get_model)
    return router
