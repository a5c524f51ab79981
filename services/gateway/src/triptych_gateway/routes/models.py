"""/v1/models: what the registered instances serve, and the caller's key may use."""

import time
from typing import Any

from fastapi import APIRouter, Request

from triptych_gateway.access.auth import ApiKeys
from triptych_gateway.endpoints.local_endpoints import GET_MODEL, LIST_MODELS
from triptych_gateway.errors import model_not_found
from triptych_gateway.routes.local import add_route
from triptych_gateway.routing.registry_view import RegistryView


def model_routes(api_keys: ApiKeys, view: RegistryView) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def card(model: str) -> dict[str, Any]:
        known = {"id": model, "object": "model", "created": created, "owned_by": "triptych"}
        return {**known, "parent": view.parent_of(model)}

    async def list_models(request: Request) -> dict[str, Any]:
        caller = api_keys.check_key(request.headers.get("authorization"))
        return {"object": "list", "data": [card(model) for model in view.models if caller.may_use(model)]}

    async def get_model(model: str, request: Request) -> dict[str, Any]:
        caller = api_keys.check_key(request.headers.get("authorization"))
        if model not in view.models or not caller.may_use(model):
            raise model_not_found(model)
        return card(model)

    add_route(router, LIST_MODELS, list_models)
    add_route(router, GET_MODEL, get_model)
    return router
