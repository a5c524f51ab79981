"""Cheap clients: one connection each, one request after the other, with the times of answers."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Self, cast
from urllib.parse import urlsplit

import httptools
import orjson

from gateway_bench.upstream import MODEL

ANSWER_LIMIT_S = 30.0


@dataclass(frozen=True)
class Workload:
    """Requests of clients, and the upstream's answers to them."""

    name: str
    stream: bool
    num_clients: int
    num_events: int
    first_ms: float
    gap_ms: float

    @property
    def answer_s(self) -> float:
        """Seconds that the upstream takes for an answer."""
        return (self.first_ms + self.gap_ms * (self.num_events - 1)) / 1e3

    @property
    def upstream_field(self) -> str:
        """Field that tells the upstream how to answer."""
        return f"{self.num_events},{self.first_ms},{self.gap_ms}"

    @property
    def request(self) -> bytes:
        """Bytes of one complete request."""
        body = orjson.dumps(
            {
                "model": MODEL,
                "messages": [
                    {"role": "system", "content": "You are a helpful assistant."},
                    {"role": "user", "content": "Why is the sky blue? " * 10},
                ],
                "max_tokens": self.num_events,
                "temperature": 0.0,
                "stream": self.stream,
                "user": self.upstream_field,
            }
        )
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass
class Times:
    """Milliseconds since the request was written, for one workload and arm."""

    first_ms: list[float] = field(default_factory=list)  # first byte of the body
    last_ms: list[float] = field(default_factory=list)  # end of the answer
    requests_per_s: list[float] = field(default_factory=list)  # of each round
    cpu_ms: list[float] = field(default_factory=list)  # of the arm's process, per request, of each round


class Client(asyncio.Protocol):
    """Connection on which `ask` sends one request and returns at the end of its answer."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._started_at = self._first_at = 0.0
        self.num_bytes = 0

    @classmethod
    async def connect(cls, url: str) -> Self:
        parts = urlsplit(url)
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(cls, parts.hostname or "", parts.port or 80)
        return client

    async def ask(self, request: bytes) -> tuple[float, float]:
        """Milliseconds to the first byte of the body, and to the end.

        Raises:
            RuntimeError: the answer is no success, or the connection was closed.
        """
        if self._transport is None:
            raise RuntimeError("the connection is closed")
        self._ended = asyncio.get_running_loop().create_future()
        self._first_at, self.num_bytes = 0.0, 0
        self._started_at = time.perf_counter()
        self._transport.write(request)
        async with asyncio.timeout(ANSWER_LIMIT_S):
            await self._ended
        ended_at = time.perf_counter()
        return (self._first_at - self._started_at) * 1e3, (ended_at - self._started_at) * 1e3

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # ---- what the connection and the parser report --------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._ended.done():
            self._ended.set_exception(RuntimeError(f"connection closed: {exc!r}"))
            self._ended.exception()  # may have no reader

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200 and not self._ended.done():
            self._ended.set_exception(RuntimeError(f"status {status}"))

    def on_body(self, body: bytes) -> None:
        self.num_bytes += len(body)
        if not self._first_at:
            self._first_at = time.perf_counter()

    def on_message_complete(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


async def ask_for(url: str, workload: Workload, seconds: float, times: Times) -> int:
    """Run all clients of `workload` against `url` without pause, their starts spread over an answer's time.

    Returns:
        The number of answers.
    """
    request = workload.request
    num_answers = 0
    began = time.perf_counter()
    until = began + seconds

    async def one(client: Client, starts_after_s: float) -> None:
        nonlocal num_answers
        await asyncio.sleep(starts_after_s)
        while time.perf_counter() < until:
            first, last = await client.ask(request)
            times.first_ms.append(first)
            times.last_ms.append(last)
            num_answers += 1

    clients = [await Client.connect(url) for _ in range(workload.num_clients)]
    try:
        async with asyncio.TaskGroup() as group:
            for number, client in enumerate(clients):
                group.create_task(one(client, workload.answer_s * number / len(clients)))
    finally:
        for client in clients:
            client.close()
    times.requests_per_s.append(num_answers / (time.perf_counter() - began))
    return num_answers


async def ask_each_in_turn(urls: dict[str, str], workload: Workload, num: int) -> dict[str, Times]:
    """Ask each arm once per turn with one client, `num` times, so that noise hits all alike."""
    request = workload.request
    times = {arm: Times() for arm in urls}
    clients = {arm: await Client.connect(url) for arm, url in urls.items()}
    try:
        for _ in range(num):
            for arm, client in clients.items():
                first, last = await client.ask(request)
                times[arm].first_ms.append(first)
                times[arm].last_ms.append(last)
    finally:
        for client in clients.values():
            client.close()
    return times
