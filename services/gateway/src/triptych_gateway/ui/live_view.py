"""LiveView: what one caller may see at `/ui`, the events that keep it current, and the files of the page.

A caller sees the requests of its own API key. An operator's key sees those of all keys, and so does everybody
where no keys are set.

    event: snapshot   everything, once
    event: requests   those that have changed, and each second those that run
    event: system     each second

Each event is made when the previous one has been read, of the changes until then. A page that reads nothing
for `SEND_LIMIT_S` is dropped. The stream also ends when its key is no longer valid, or its rights have
changed: the page reconnects and gets what the key may see now.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych_common.domain.errors import RequestError
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.access.auth import Caller
from triptych_gateway.race import race
from triptych_gateway.request.request_body import wait_disconnect
from triptych_gateway.tracing.recent_requests import Listener, RecentRequest, RecentRequests
from triptych_gateway.ui.system_view import SystemView

log = get_logger(__name__)

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
PAGE = "page.html"
# Scripts and styles of our own files alone; nothing is loaded from, or sent to, another origin.
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script';"
        " trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
SYSTEM_INTERVAL_S = 1.0
LOOK_INTERVAL_S = 0.4  # interval of checks for the gateway's end: less than its wait for the last answers
EVENT_GAP_S = 0.1  # changes within it are one event
SEND_LIMIT_S = 10.0  # for each piece of an event
PIECE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    media_type: str


def read_page_files() -> dict[str, PageFile]:
    folder = files(__package__).joinpath("static")
    return {
        each.name: PageFile(each.read_bytes(), _TYPES[suffix])
        for each in folder.iterdir()
        if (suffix := "." + each.name.rpartition(".")[2]) in _TYPES
    }


class LiveView:
    """Page content for one caller, by its rights."""

    def __init__(self, caller: Caller, recents: RecentRequests, system: SystemView) -> None:
        self._caller = caller
        self.recents = recents
        self.source = system

    @property
    def owner(self) -> str | None:
        """Owner whose requests are shown; None for all."""
        return None if self._caller.is_operator else self._caller.owner

    async def system(self) -> dict[str, Any]:
        known = await self.source.describe(self._caller)
        if self._caller.is_operator:
            totals = {
                "num_requests": self.recents.num_requests,
                "num_items": self.recents.num_items,
                "avoided": dict(self.recents.avoided),
            }
            known["since_start"] = totals
        return known

    async def snapshot(self) -> dict[str, Any]:
        """Return the whole view; requests with the oldest first."""
        known = await self.system()
        return {"system": known, "requests": self.as_json(self.recents.visible_to(self.owner))}

    def running(self) -> list[RecentRequest]:
        return [each for each in self.recents.visible_to(self.owner) if each.status is None]

    def as_json(self, requests: Iterable[RecentRequest]) -> list[orjson.Fragment]:
        now = time.monotonic()
        return [each.as_fragment(now) for each in requests]


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(
        self, view: LiveView, *, is_over: Callable[[], bool], has_rights: Callable[[], bool]
    ) -> None:
        """Store the view; `is_over` is True when the gateway shuts down, `has_rights` while the caller's
        key has its first rights (RequestError when it is no longer valid).
        """
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._view, self._is_over, self._has_rights = view, is_over, has_rights

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._view.recents.listen(self._view.owner) as listener:
            async with self._view.source.store.hold():
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
