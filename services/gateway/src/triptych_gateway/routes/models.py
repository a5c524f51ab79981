"""/v1/models: what the registered instances serve, and the caller's key may use."""

import time
from typing import Any

from fastapi import APIRouter, Request

from triptych_gateway.access.auth import Caller
from triptych_gateway.endpoints.local_endpoints import GET_MODEL, LIST_MODELS
from triptych_gateway.errors import model_not_found
from triptych_gateway.proxy.services import Services
from triptych_gateway.routes.local import add_route


def model_routes(services: Services) -> APIRouter:
    router, api_keys, instances = APIRouter(), services.access.api_keys, services.instances
    created = int(time.time())
    view, models = instances.view, instances.models

    def card(name: str) -> dict[str, Any]:
        known = {"id": name, "object": "model", "created": created, "owned_by": "triptych"}
        return {**known, "parent": view.parent_of(models.resolve(name))}

    def names_for(caller: Caller) -> list[str]:
        """Return served models, adapters and aliases that the caller may request."""
        aliases = [alias for model in view.models for alias in models.aliases_of(model)]
        names = {*aliases, *(model for model in view.models if models.resolve(model) == model)}
        return sorted(
            name
            for name in names
            if models.permitted_name(models.resolve(name), name, caller.may_use) is not None
        )

    async def list_models(request: Request) -> dict[str, Any]:
        caller = api_keys.check_key(request.headers.get("authorization"))
        return {"object": "list", "data": [card(name) for name in names_for(caller)]}

    async def get_model(model: str, request: Request) -> dict[str, Any]:
        caller = api_keys.check_key(request.headers.get("authorization"))
        if model not in names_for(caller):
            raise model_not_found(model)
        return card(model)

    add_route(router, LIST_MODELS, list_models)
    add_route(router, GET_MODEL, get_model)
    return router
