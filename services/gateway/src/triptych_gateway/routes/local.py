"""Routes of the endpoints that the gateway answers itself."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter

from triptych_gateway.endpoints.endpoint import Endpoint

Handler = Callable[..., Any]


def add_route(router: APIRouter, endpoint: Endpoint, handler: Handler) -> None:
    """Serve `endpoint` by `handler`, which checks the key if the table requires one."""
    router.add_api_route(
        endpoint.path,
        handler,
        methods=list(endpoint.methods),
        response_model=None,
        include_in_schema=False,  # the table describes it
    )
