"""EventStream: content of the page, as server-sent events while it is open.

    event: snapshot   everything, once
    event: requests   those that have changed, and each second those that run
    event: system     each second

Each event is made when the previous one has been read, of the changes until then. A page that reads nothing
for `SEND_LIMIT_S` is dropped. The stream also ends when its key is no longer valid, or its rights have
changed: the page reconnects and gets what the key may see now.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych_common.domain.errors import RequestError
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.race import race
from triptych_gateway.request.request_body import wait_disconnect
from triptych_gateway.tracing.recent_requests import Listener, RecentRequests
from triptych_gateway.ui.live_view import LiveView
from triptych_gateway.ui.system_view import SystemView

log = get_logger(__name__)

SYSTEM_INTERVAL_S = 1.0
LOOK_INTERVAL_S = 0.4  # interval of checks for the gateway's end: less than its wait for the last answers
EVENT_GAP_S = 0.1  # changes within it are one event
SEND_LIMIT_S = 10.0  # for each piece of an event
PIECE_BYTES = 64 << 10


class EventStream(Response):
    """Stream of events for one caller."""

    media_type = "text/event-stream"

    def __init__(
        self,
        view: LiveView,
        recents: RecentRequests,
        system: SystemView,
        is_over: Callable[[], bool],
        has_rights: Callable[[], bool],
    ) -> None:
        """Store the sources; `is_over` is True when the gateway shuts down, `has_rights` while the caller's
        key has its first rights (RequestError when it is no longer valid).
        """
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._view, self._recents, self._system = view, recents, system
        self._is_over, self._has_rights = is_over, has_rights

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._recents.listen(self._view.owner) as listener:
            async with self._system.store.hold():
                try:
                    await race(self._write(listener, send), wait_disconnect(receive, lambda: False))
                except ClientDisconnect:
                    return
                except TimeoutError:
                    log.info("page dropped: it does not read")

    async def _write(self, listener: Listener, send: Send) -> None:
        loop = asyncio.get_running_loop()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _send_event(send, "snapshot", await self._view.snapshot())
        system_at = loop.time() + SYSTEM_INTERVAL_S
        while not self._is_over():
            await listener.wait_changes(max(0.0, min(LOOK_INTERVAL_S, system_at - loop.time())))
            is_due = loop.time() >= system_at
            changed = dict.fromkeys(listener.take_changes())
            if is_due:
                if not self._may_go_on():
                    break
                changed |= dict.fromkeys(self._view.running())
                await _send_event(send, "system", await self._view.system())
                system_at = loop.time() + SYSTEM_INTERVAL_S
            if changed:
                await _send_event(send, "requests", self._view.as_json(changed))
                await asyncio.sleep(EVENT_GAP_S)
        await send({"type": "http.response.body", "body": b""})

    def _may_go_on(self) -> bool:
        try:
            return self._has_rights()
        except RequestError:
            return False


async def _send_event(send: Send, name: str, data: Any) -> None:
    """Send an event in pieces, each after the one before was read, for the sake of slow links.

    Raises:
        TimeoutError: the client takes nothing.
    """
    event = f"event: {name}\ndata: ".encode() + orjson.dumps(data) + b"\n\n"
    for start in range(0, len(event), PIECE_BYTES):
        async with asyncio.timeout(SEND_LIMIT_S):
            body = event[start : start + PIECE_BYTES]
            await send({"type": "http.response.body", "body": body, "more_body": True})
