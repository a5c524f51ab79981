"""The gateway's connections to instances: what it uses of aiohttp's client, on the model's network.

Frames of an answer: `prefilled` and its `kv_transfer_params`; `first` and `answer`, of a stream; `refused`
and a code; `draining`; `error`; `broken`, the end of the connection.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import ClientConnectionError

from tests.support.protocol_world.gateway import ClientRequest
from tests.support.protocol_world.network import Network
from tests.support.protocol_world.virtual_loop import VirtualLoop
from triptych_common.runtime import DRAINING_HEADER

FIRST = {"choices": [{"index": 0, "delta": {"content": "word"}}]}
ENDS = frozenset({"prefilled", "refused", "draining", "error", "answer", "broken"})  # nothing follows


class Connection:
    """One request to one instance, and `ClientResponse` of its answer."""

    def __init__(self, loop: VirtualLoop, close: Callable[["Connection"], None]) -> None:
        self.status = 200
        self.headers: dict[str, str] = {}
        self.content_length: int | None = None
        self.head: asyncio.Future[Connection] = loop.create_future()
        self.is_done = False  # on the instance's side
        self._chunks: deque[bytes | Exception] = deque()
        self._has_chunk = asyncio.Event()
        self._close = close

    @property
    def content(self) -> "Connection":
        return self

    def close(self) -> None:
        self._close(self)

    async def readany(self) -> bytes:
        while not self._chunks:
            if self.is_done:
                return b""
            self._has_chunk.clear()
            await self._has_chunk.wait()
        chunk = self._chunks.popleft()
        if isinstance(chunk, Exception):
            raise chunk
        return chunk

    def on_frame(self, what: str, *more: Any) -> None:
        self.is_done = what in ENDS
        if what == "broken" and not self.head.done():
            self.head.set_exception(ClientConnectionError("it went away"))
            self.head.exception()
            return
        match what:
            case "prefilled":
                self._take(orjson.dumps({"kv_transfer_params": more[0], "choices": []}))
            case "first":
                self.headers["Content-Type"] = "text/event-stream"
                self._take(_event(FIRST))
            case "answer":
                self._take(b"data: [DONE]\n\n")
            case "refused":
                self._fail(503, more[0])
            case "draining":
                self.headers[DRAINING_HEADER] = "1"
                self._fail(503, "draining")
            case "error" if self.head.done():
                self._take(_event({"error": {"message": "it failed", "code": 500}}))
            case "error":
                self._fail(500, "generation_failed")
            case "broken":
                self._chunks.append(ClientConnectionError("it broke off"))
        self._has_chunk.set()
        if not self.head.done():
            self.head.set_result(self)

    def _fail(self, status: int, code: str) -> None:
        self.status = status
        self._take(orjson.dumps({"error": {"message": code, "code": code}}))

    def _take(self, chunk: bytes) -> None:
        if self.is_done:
            self.content_length = len(chunk)
        self._chunks.append(chunk)


class Connections:
    """`ClientSession` of one gateway. `find` knows its requests, `is_reachable` the instances."""

    def __init__(
        self,
        gateway: str,
        network: Network,
        loop: VirtualLoop,
        find: Callable[[str], ClientRequest],
        is_reachable: Callable[[str], bool],
    ) -> None:
        self._gateway = gateway
        self._network = network
        self._loop = loop
        self._find = find
        self._is_reachable = is_reachable
        self.open: dict[tuple[str, int], tuple[str, Connection]] = {}  # by request and attempt

    async def request(
        self, method: str, url: Any, *, data: bytes, headers: dict[str, str], allow_redirects: bool
    ) -> Connection:
        """As aiohttp's: returns when the answer's headers are there."""
        request = self._find(headers["X-Request-Id"])
        instance = url.host
        attempt = len(request.dispatched) + 1
        request.dispatched.append((instance, attempt))
        if not self._is_reachable(instance):
            request.ends["broken"] += 1
            raise ClientConnectionError("no connection")
        key = request.request_id, attempt
        connection = Connection(self._loop, lambda each: self._on_closed(key, each))
        self.open[key] = instance, connection
        what = {"p": "prefill", "d": "decode"}.get(instance.split("-")[0], "dispatch")
        self._network.send((self._gateway, instance, "http"), (what, request.request_id, attempt, data))
        try:
            return await connection.head
        except BaseException:
            connection.close()
            raise

    def receive(self, frame: tuple[Any, ...]) -> None:
        what, request_id, attempt, *more = frame
        _, connection = self.open.get((request_id, attempt), (None, None))
        if connection is None or connection.is_done:
            return
        ends: Counter[str] = self._find(request_id).ends
        ends[what] += what not in ("first", "broken") or not connection.head.done()
        self._loop.run(lambda: connection.on_frame(what, *more))

    def break_all(self) -> None:
        """The gateway is gone."""
        for key, (_, connection) in list(self.open.items()):
            self._on_closed(key, connection)

    def _on_closed(self, key: tuple[str, int], connection: Connection) -> None:
        instance, _ = self.open.pop(key, ("", connection))
        if instance and not connection.is_done and self._is_reachable(instance):
            self._network.send((self._gateway, instance, "http"), ("abort", *key, b""))


def _event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
