"""A server of the test's that answers as it is told, byte by byte, and counts who comes."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

SERVED = "127.0.0.2"  # stands for the Internet: tests allow it
FORBIDDEN = "127.0.0.1"
TLS_HELLO = b"\x16"


@dataclass(frozen=True)
class Asked:
    """One request as it came."""

    target: str
    headers: dict[str, str]


Answer = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class MediaServer:
    """Each connection has one request; `answers` by path, without the query."""

    host: str = SERVED
    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    port: int = 0

    def url(self, target: str = "/", scheme: str = "http", host: str | None = None) -> str:
        return f"{scheme}://{host or self.host}:{self.port}{target}"

    def leading_to(self, url: str) -> str:
        """A URL of this server that leads to `url` over two redirects."""
        self.answers |= {"/first": redirecting(self.url("/second")), "/second": redirecting(url)}
        return self.url("/first")

    @asynccontextmanager
    async def running(self, tls: ssl.SSLContext | None = None) -> AsyncIterator["MediaServer"]:
        tasks: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(connected, self.host, self.port, ssl=tls, backlog=1000)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in tuple(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                first = await reader.readexactly(1)
                if first == TLS_HELLO:  # to a server without TLS
                    writer.write(head(400, {}))
                    return
                raw = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                line, *fields = raw.removesuffix("\r\n\r\n").split("\r\n")
                pairs = [each.partition(":") for each in fields]
                asked = Asked(line.split(" ")[1], {name.lower(): value.strip() for name, _, value in pairs})
                self.asked.append(asked)
                answer = self.answers.get(asked.target.partition("?")[0], answering(404))
                await answer(asked, writer)
                await writer.drain()
        finally:
            self.num_open -= 1
            writer.close()


def head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def answering(status: int = 200, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
    """The same answer to everybody."""

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(status, {"Content-Length": str(len(body)), **(headers or {})}) + body)

    return answer


def redirecting(location: str, status: int = 302) -> Answer:
    return answering(status, headers={"Location": location})


def sending(raw: bytes) -> Answer:
    """These bytes, and the connection is closed."""

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    return answer


def repeating(start: bytes, piece: bytes, pause_s: float = 0.0) -> Answer:
    """`start`, and `piece` as long as somebody takes it."""

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)  # a server that is slow on purpose

    return answer


async def hanging(_: Asked, __: asyncio.StreamWriter) -> None:
    """No answer until the server ends."""
    await asyncio.get_running_loop().create_future()


async def resetting(_: Asked, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


def in_turn(*answers: Answer) -> Answer:
    """One after the other; the last one to all that come later."""
    left = list(answers)

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(asked, writer)

    return answer
