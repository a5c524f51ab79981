"""The real gateway of requests in stages: `MultimodalRequest`, `Forwarder` and all behind it, on played HTTP.

What it knows of instances is the registry as it was last read: the world decides when it is read again.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import orjson
from aiohttp import ClientConnectionError

from tests.support.protocol_world.gateway import (
    FIRST_TOKEN_S,
    METRICS,
    ClientRequest,
    ListRecords,
    RegistryGateway,
    _taken,
)
from tests.support.protocol_world.network import DIGEST, Network
from tests.support.protocol_world.virtual_loop import CLOCK, VirtualLoop
from triptych_common.protocol.ids import RequestId
from triptych_common.runtime import DRAINING_HEADER
from triptych_common.telemetry import span
from triptych_gateway.access.auth import ANONYMOUS
from triptych_gateway.decision.namespace_decisions import Answering
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.proxy.context import RequestContext, UpstreamRequest
from triptych_gateway.proxy.forward import Forwarder
from triptych_gateway.proxy.multimodal_request import MultimodalRequest
from triptych_gateway.proxy.routing import chat_routing
from triptych_gateway.proxy.stages import Stages
from triptych_gateway.proxy.streaming import ClientStream
from triptych_gateway.proxy.upstream_body import media_body
from triptych_gateway.race import race
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.routing.instances import Instances
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.router import Router
from triptych_gateway.settings import RoutingSettings
from triptych_gateway.tracing.request_span import RequestSpan

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
        """Return when the answer's headers are there, as aiohttp's method does."""
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


MODEL = "model"
MAX_ATTEMPTS = 2  # `max_dispatch_attempts`
SUSPECT_S = 2.0
GRACE_S = 5.0
CHUNK_S = 60.0


class NothingLearned:
    """`EncodeDecisions` of a gateway that decides nothing."""

    def begin_request(self, record: Any, estimate: Any, num_prompt_bytes: int) -> Answering:
        return Answering()


class OneStore:
    """`TransferOrders` where all instances have one store."""

    async def bring(self, item_wait: Any, instance: Any) -> None:
        """Every item is there."""


class StageGateway(RegistryGateway):
    """One gateway of instances that prefill or decode."""

    def __init__(
        self,
        name: str,
        network: Network,
        is_reachable: Any,
        max_attempts: int,
        list_records: ListRecords,
        find_request: Callable[[str], ClientRequest],
    ) -> None:
        self._find_request = find_request
        super().__init__(name, network, is_reachable, max_attempts, list_records)

    def start(self) -> None:
        super().start()
        self.connections = Connections(
            self.name, self._network, self.loop, self._find_request, self._is_reachable
        )
        self.view = RegistryView(cast("Any", self), 1.0)
        self.router = Router(SUSPECT_S)
        self.instances = Instances(
            self.view,
            self.router,
            RoutingSettings(instance_grace_s=GRACE_S, max_dispatch_attempts=MAX_ATTEMPTS),
        )
        stages = Stages(
            cast("Any", self.connections),
            self.router,
            cast("Any", NothingLearned()),
            METRICS,
            cast("Any", None),  # bodies are small: no thread parses them
            max_answer_bytes=1 << 20,
        )
        self.forwarder = Forwarder(self.instances, stages, cast("Any", OneStore()), METRICS, CHUNK_S)
        self.read_registry()

    def read_registry(self) -> None:
        self._read_at = CLOCK.now
        super().read_registry()
        self.router.observe(self.view.records, CLOCK.now)

    @property
    def is_outdated(self) -> bool:
        """The registry is not what was read."""
        return self.view.records != tuple(self._list_records())

    @property
    def next_reading(self) -> float | None:
        """When a request that waits for a new view gets one; None: none waits."""
        is_awaited = bool(self.view._changed._waiters)
        return self._read_at + self.view.interval_s if is_awaited else None

    def next_timer(self, *, with_upkeep: bool = True) -> float | None:
        both = super().next_timer(with_upkeep=with_upkeep), self.next_reading if with_upkeep else None
        return min((when for when in both if when is not None), default=None) if self.is_up else None

    def run_due(self) -> None:
        super().run_due()
        if self.is_up and (when := self.next_reading) is not None and when <= CLOCK.now:
            self.read_registry()

    def receive_frame(self, frame: tuple[Any, ...]) -> None:
        self.connections.receive(frame)

    def _abort(self, request: ClientRequest) -> None:
        """Its process is gone, with all connections."""
        self.connections.break_all()

    # ---- one request -----------------------------------------------------------------------------
    async def _serve_items(self, request: ClientRequest) -> None:
        body = _body_of(request)
        items = tuple(_taken(mm_hash, index) for index, mm_hash in enumerate(request.hashes))
        chat = ChatRequest(body, MODEL, True, tuple(each.part for each in items), {}, {})
        deadline = CLOCK.now + FIRST_TOKEN_S
        with span("request") as started:
            root = RequestSpan(started, "chat", CLOCK.now)
        context = RequestContext(RequestId(request.request_id), ANONYMOUS, root, CLOCK.now, deadline)
        services, nothing = SimpleNamespace(media=None, instances=self.instances), cast("Any", None)
        client = ClientStream(_Receiver(request).take, {})
        life = MultimodalRequest(cast("Any", services), chat, context, nothing, client)
        await life._wait_variant()
        context = life._context
        routing = chat_routing(chat, "", DIGEST, items)
        chosen = await life._wait_instance(routing)
        item_wait = ItemWait(context.request_id, chosen.instance, items, deadline, None, DIGEST)
        async with self.final_acks.hold_acks(item_wait), self.orders.open_wait(item_wait):
            async with asyncio.timeout_at(deadline):
                self.orders.order_missing(item_wait)
                await race(item_wait.wait_sizes(), item_wait.wait_failure())
            sent = media_body(
                chat,
                items,
                item_wait.sizes,
                request_id=request.request_id,
                gateway=self.name,
                traceparent=None,
                remaining_ms=int((deadline - CLOCK.now) * 1000),
            )
            upstream = UpstreamRequest(
                context, chat, sent, DIGEST, item_wait=item_wait, first_choice=chosen, routing=routing
            )
            await race(self.forwarder.forward(upstream, client), item_wait.wait_failure())


class _Receiver:
    """The client's end of its connection."""

    def __init__(self, request: ClientRequest) -> None:
        self._request = request

    async def take(self, message: Any) -> None:
        self._request.has_begun = True


def _body_of(request: ClientRequest) -> dict[str, Any]:
    """A later turn begins with the messages of the one before."""
    parts: list[Any] = [{"type": "image_url"} for _ in request.hashes]
    messages: list[Any] = [
        {"role": "user", "content": [*parts, {"type": "text", "text": request.conversation}]}
    ]
    for number in range(request.num_turns):
        messages += [
            {"role": "assistant", "content": f"answer {number}"},
            {"role": "user", "content": f"more {number}"},
        ]
    return cast(
        "dict[str, Any]", orjson.loads(orjson.dumps({"model": MODEL, "stream": True, "messages": messages}))
    )
