"""A TCP proxy between a client and a server, which can cut, delay, swallow and turn elsewhere.

It runs on a thread of its own: the tests' event loops and the code under test may block.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar

T = TypeVar("T")
CALL_TIMEOUT_S = 10.0
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # for SO_LINGER
CHUNK = 1 << 16


class TcpProxy:
    """Listens on a port of `host`; each connection goes to where `target` points when it is made."""

    def __init__(
        self,
        target: Path | int,
        *,
        tls: ssl.SSLContext | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """`target`: a Unix socket, or a port of 127.0.0.1. `port` 0: any that is free."""
        self.port = port
        self._host = host
        self.reply_delay_s = 0.0  # of each piece that the server sends
        self.num_connections = 0  # ever accepted
        self._target = target
        self._tls = tls
        self._is_cut = False
        self._resets = False
        self._mute_up_to = 0  # connections, by the order in which they were accepted
        self._pairs: set[asyncio.Task[Any]] = set()
        self._loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._call(self._listen(self.port))
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *exception: object) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_TIMEOUT_S)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cut(self) -> None:
        """Close every connection, and accept none until `restore`."""
        self._is_cut = True
        self._call(self._cut())

    def restore(self) -> None:
        """Listen again, on the same port."""
        self._is_cut = False
        self._server = self._call(self._listen(self.port))

    def drop_connections(self) -> None:
        """Close every connection; new ones are accepted."""
        self._call(self._drop())

    def reset_connections(self) -> None:
        """As a peer that is gone, or a firewall that has forgotten them: no orderly end."""
        self._resets = True
        self._call(self._drop())
        self._resets = False

    def mute_connections(self) -> None:
        """What the server answers on them is lost from now on, as where one direction is cut."""
        self._mute_up_to = self.num_connections

    def turn_to(self, target: Path | int) -> None:
        """New connections go there."""
        self._target = target

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(CALL_TIMEOUT_S)

    # ---- on the proxy's thread ----
    async def _listen(self, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._serve, self._host, port, ssl=self._tls)

    async def _cut(self) -> None:
        self._server.close()
        await self._drop()

    async def _drop(self) -> None:
        for pair in list(self._pairs):
            pair.cancel()
        await asyncio.gather(*self._pairs, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:  # accepted just before
            writer.transport.abort()
            return
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._pairs.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._join(reader, writer, self.num_connections)
        finally:
            self._pairs.discard(task)
            if self._resets:
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE
                )
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        dialled = asyncio.ensure_future(self._dial())
        try:
            other_reader, other_writer = await asyncio.shield(dialled)
        except asyncio.CancelledError:  # a dial that is cancelled leaves a transport that nobody closes
            with contextlib.suppress(OSError):
                (await dialled)[1].transport.abort()
            raise
        try:
            directions = {
                asyncio.ensure_future(self._pump(reader, other_writer, number, is_reply=False)),
                asyncio.ensure_future(self._pump(other_reader, writer, number, is_reply=True)),
            }
            try:
                await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in directions:
                    each.cancel()
                await asyncio.gather(*directions, return_exceptions=True)
        finally:
            other_writer.transport.abort()

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._target, Path):
            return await asyncio.open_unix_connection(str(self._target))
        return await asyncio.open_connection("127.0.0.1", self._target)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int, *, is_reply: bool
    ) -> None:
        """One direction of the connection `number`."""
        while data := await reader.read(CHUNK):
            if is_reply:
                if number <= self._mute_up_to:
                    continue
                if self.reply_delay_s:
                    await asyncio.sleep(self.reply_delay_s)
            writer.write(data)
            await writer.drain()


@contextlib.contextmanager
def proxy_to(target: Path | int, *, tls: ssl.SSLContext | None = None) -> Iterator[TcpProxy]:
    """A proxy that runs; gone at the end."""
    with TcpProxy(target, tls=tls) as proxy:
        yield proxy
