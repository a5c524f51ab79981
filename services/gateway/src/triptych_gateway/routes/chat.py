"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from triptych_gateway.chat.exchange import ChatExchange, ChatParts


def chat_routes(parts: ChatParts) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", response_class=Response)
    async def chat_completions(request: Request) -> Response:
        return ChatExchange(parts, request)

    return router
