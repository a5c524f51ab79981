"""The HTTP server of a prefill_decode, whatever engine it hosts."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


class ListeningServer(uvicorn.Server):
    """The service owns the signals, and hears when connections are accepted."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
