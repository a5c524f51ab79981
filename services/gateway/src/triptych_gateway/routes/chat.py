"""POST /v1/chat/completions."""

from starlette.types import ASGIApp, Receive, Scope, Send

from triptych_gateway.chat.exchange import ChatExchange, ChatParts

CHAT_PATH = "/v1/chat/completions"


class ChatApp:
    """ASGI application of the chat route."""

    def __init__(self, parts: ChatParts) -> None:
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await ChatExchange(self._parts, scope, receive, send).run()


class ChatFirst:
    """ASGI application that gives chat completions to `chat`, and every other request to `others`.

    No framework stands between the server and a chat completion: its layers take time of every request.
    """

    def __init__(self, chat: ASGIApp, others: ASGIApp) -> None:
        self._chat = chat
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_chat = scope["type"] == "http" and scope["path"] == CHAT_PATH and scope["method"] == "POST"
        await (self._chat if is_chat else self._others)(scope, receive, send)
