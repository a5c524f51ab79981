"""HTTP server of a prefill_decode with any engine: start of listening, and drain.

    serving --stop--> announced, refusing --last request ended, or the time is over--> drained

Announced first: a gateway whose request is refused chooses another instance, and must not choose this one.
"""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from triptych_common.coordination import Registration
from triptych_common.runtime.drain import AsgiApp, DrainGate
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

UNGUARDED_PATHS = frozenset({"/health", "/metrics", "/ping", "/status", "/version"})


class ListeningServer(uvicorn.Server):
    """Server without signal handlers; `listening` is set when connections are accepted."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def guarded(app: AsgiApp) -> DrainGate:
    """Wrap `app` so that its requests are counted and, while draining, refused, except reads of its state."""
    return DrainGate(app, lambda path: path not in UNGUARDED_PATHS)


async def drain(registration: Registration, gate: DrainGate, timeout_s: float) -> None:
    """Return when no request runs any more, or after `timeout_s`; the caller cuts off the rest."""
    await registration.announce_draining()
    gate.refuse()
    log.info("draining", num_requests=gate.num_requests)
    try:
        async with asyncio.timeout(timeout_s):
            await gate.wait_idle()
    except TimeoutError:
        log.warning("drain timeout: requests cut off", num_requests=gate.num_requests)
