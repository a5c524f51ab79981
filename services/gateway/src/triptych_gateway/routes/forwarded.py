"""Routes of the endpoints that are forwarded."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from triptych_gateway.endpoints.endpoint import Endpoint, EndpointKind
from triptych_gateway.endpoints.table import FORWARDED
from triptych_gateway.proxy.exchange import AudioExchange, ChatExchange, Exchange, TextExchange
from triptych_gateway.proxy.services import Services
from triptych_gateway.responses.exchange import ResponseExchange, ResponseParts, StoredExchange

OpenExchange = Callable[[Scope, Receive, Send], Exchange[Any]]


class ForwardedApp:
    def __init__(self, endpoint: Endpoint, open_exchange: OpenExchange) -> None:
        self.endpoint = endpoint
        self._open_exchange = open_exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._open_exchange(scope, receive, send).run()


def forwarded_apps(services: Services, responses: ResponseParts) -> list[ForwardedApp]:
    return [ForwardedApp(endpoint, _exchange_of(endpoint, services, responses)) for endpoint in FORWARDED]


def _exchange_of(endpoint: Endpoint, services: Services, responses: ResponseParts) -> OpenExchange:
    if endpoint.kind is EndpointKind.STORED:
        return partial(StoredExchange, endpoint, services, responses)
    if endpoint.kind is EndpointKind.RESPONSE:
        return partial(ResponseExchange, endpoint, services, responses)
    if endpoint.kind is EndpointKind.SOUND:
        return partial(AudioExchange, endpoint, services)
    return partial(ChatExchange if endpoint.takes_media else TextExchange, endpoint, services)


class ForwardedFirst:
    """ASGI application that passes forwarded requests to `apps`, and all others to `others`.

    No framework stands between the server and a forwarded request, whose layers would cost time; only paths
    with parameters go through `others`.
    """

    def __init__(self, apps: Sequence[ForwardedApp], others: ASGIApp) -> None:
        self._apps = {(method, app.endpoint.path): app for app in apps for method in app.endpoint.methods}
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._others
        if scope["type"] == "http":
            app = self._apps.get((scope["method"], scope["path"]), app)
        await app(scope, receive, send)
