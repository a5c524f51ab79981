"""End of an HTTP service: running requests are finished, later ones go elsewhere.

    OPEN --leave--> LEAVING --refuse--> REFUSING
      `-------------refuse-----------------^

OPEN serves. LEAVING serves too, but asks every client to take another connection next time, which a
balancer gives it elsewhere. REFUSING answers 503: nothing of the request was done, so it can be sent
again at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from enum import StrEnum
from typing import Any

import orjson

from triptych_common.domain.errors import RequestError
from triptych_common.domain.transitions import check_transition

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
BodyOf = Callable[[str, RequestError], bytes]

DRAINING_HEADER = "X-Triptych-Draining"
RETRY_AFTER_S = 1
_CLOSE = (b"connection", b"close")


class DrainState(StrEnum):
    OPEN = "open"
    LEAVING = "leaving"
    REFUSING = "refusing"


ALLOWED: dict[DrainState, frozenset[DrainState]] = {
    DrainState.OPEN: frozenset({DrainState.LEAVING, DrainState.REFUSING}),
    DrainState.LEAVING: frozenset({DrainState.REFUSING}),
    DrainState.REFUSING: frozenset(),
}


class DrainGate:
    """ASGI application in front of another one: counts its guarded requests, and refuses them in the end.

    Args:
        app: the application.
        guards: tells by path which requests are counted and refused; others (health) always pass.
        body_of: the body of a refusal, by its path.
    """

    def __init__(
        self, app: AsgiApp, guards: Callable[[str], bool], body_of: BodyOf = lambda path, error: _dump(error)
    ) -> None:
        self._app = app
        self._guards = guards
        self._body_of = body_of
        self._idle = asyncio.Event()
        self._idle.set()
        self.state = DrainState.OPEN
        self.num_requests = 0  # guarded ones that have not ended

    def leave(self) -> None:
        """Close connections after their answers from now on (`Connection: close`)."""
        self._become(DrainState.LEAVING)

    def refuse(self) -> None:
        """Answer guarded requests with 503 from now on."""
        self._become(DrainState.REFUSING)

    async def wait_idle(self) -> None:
        """Return when no guarded request runs; bound it. None begins after `refuse`."""
        await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        closing = self._closing(send)
        if not self._guards(scope["path"]):
            await self._app(scope, receive, closing)
            return
        if self.state is DrainState.REFUSING:
            await self._answer_draining(scope["path"], send)
            return
        self.num_requests += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, closing)
        finally:
            self.num_requests -= 1
            if not self.num_requests:
                self._idle.set()

    def _closing(self, send: Send) -> Send:
        async def send_and_close(message: Message) -> None:
            if self.state is not DrainState.OPEN and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
            await send(message)

        return send_and_close

    async def _answer_draining(self, path: str, send: Send) -> None:
        error = RequestError(503, "draining", "this instance is going away; send the request again")
        headers = [
            (b"content-type", b"application/json"),
            (b"retry-after", str(RETRY_AFTER_S).encode()),
            (DRAINING_HEADER.lower().encode(), b"1"),
            _CLOSE,
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": self._body_of(path, error)})

    def _become(self, state: DrainState) -> None:
        """Move to `state`. Nothing else assigns it."""
        check_transition(ALLOWED, "drain gate", self.state, state)
        self.state = state


def _dump(error: RequestError) -> bytes:
    return orjson.dumps(error.body())
