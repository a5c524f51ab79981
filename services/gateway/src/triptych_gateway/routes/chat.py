"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from triptych_gateway.chat.exchange import ChatExchange
from triptych_gateway.gateway import Gateway


def chat_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", response_class=Response)
    async def chat_completions(request: Request) -> Response:
        return ChatExchange(gateway, request)

    return router
