"""The endpoints that are forwarded."""

from collections.abc import Mapping, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from triptych_gateway.chat.exchange import ChatExchange, ChatParts, SoundExchange, TextExchange
from triptych_gateway.endpoints.endpoint import Endpoint, EndpointKind
from triptych_gateway.endpoints.table import FORWARDED

_EXCHANGES: Mapping[EndpointKind, type[ChatExchange | SoundExchange | TextExchange]] = {
    EndpointKind.CHAT: ChatExchange,
    EndpointKind.SOUND: SoundExchange,
}


class ForwardedApp:
    """ASGI application of one endpoint."""

    def __init__(self, endpoint: Endpoint, parts: ChatParts) -> None:
        self.endpoint = endpoint
        self._parts = parts
        self._exchange = _EXCHANGES.get(endpoint.kind, TextExchange)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._exchange(self.endpoint, self._parts, scope, receive, send).run()


def forwarded_apps(parts: ChatParts) -> list[ForwardedApp]:
    """One for each endpoint that is forwarded."""
    return [ForwardedApp(endpoint, parts) for endpoint in FORWARDED]


class ForwardedFirst:
    """ASGI application that gives what is forwarded to `apps`, and every other request to `others`.

    No framework stands between the server and a request that is forwarded: its layers take time of each.
    """

    def __init__(self, apps: Sequence[ForwardedApp], others: ASGIApp) -> None:
        self._apps = {(method, app.endpoint.path): app for app in apps for method in app.endpoint.methods}
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._others
        if scope["type"] == "http":
            app = self._apps.get((scope["method"], scope["path"]), app)
        await app(scope, receive, send)
