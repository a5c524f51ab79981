"""An instance whose engine is `DecodeEngine`: the part of vLLM's OpenAI server that the gateway uses.

It has any role but `decode`, which is `stages`.
"""

import asyncio
import base64
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from blake3 import blake3
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.support.fast.processes import points
from tests.support.fast.processes.decode_engine import GRID_FIELD, DecodeEngine
from tests.support.fast.processes.kept_caches import KeptCaches, kv_transfer
from tests.support.fast.processes.tally import note_served
from tests.support.fast.processes.tensors import DEFAULT_TOKENS, DIGEST, DTYPE, MAX_GRID, MODEL, grid_of
from tests.support.fast.prompts import Finished, Item, Prompt, Token, prefix_digest
from triptych_common import release
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.messages import InstanceRecord, Modality, Role
from triptych_common.runtime import ServiceSettings, StopSignal
from triptych_common.runtime.drain import AsgiApp
from triptych_common.telemetry.logs import get_logger
from triptych_prefill_decode.http_server import ListeningServer, drain, guarded
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.consumer.consumer import Consumer
from triptych_vllm_connector.consumer.local_encode import LocalEncode, encodes_no_request
from triptych_vllm_connector.consumer.ports import EncoderCache
from triptych_vllm_connector.links.opening import open_consumer
from triptych_vllm_connector.pieces import piece_hashes
from triptych_vllm_connector.worker.loading import LoadingWorker

log = get_logger(__name__)


class EngineDiedError(TriptychError):
    """The engine cannot go on: this process must be restarted."""


class FastPrefillDecodeSettings(ServiceSettings):
    """As `PrefillDecodeSettings`, without a model."""

    port: int
    address: str = "127.0.0.1"
    store: str | None = None  # its own, by name; None: there is only one
    budget_embeds: int = 4 * MAX_GRID * MAX_GRID
    token_s: float = 0.002
    namespace: str = DIGEST
    model_version: str | None = None
    role: Role = Role.PREFILL_DECODE
    lease_s: float = 1.0
    encode_s: float = 0.02  # of an item that it encodes itself
    tally: Path

    @property
    def prefills_only(self) -> bool:
        """It keeps KV caches for others."""
        return self.role in (Role.PREFILL, Role.ENCODE_PREFILL)

    @property
    def has_tower(self) -> bool:
        return self.role in (Role.ENCODE_PREFILL, Role.ENCODE_PREFILL_DECODE)


def config_of(settings: ServiceSettings, namespace: str) -> ConnectorConfig:
    return ConnectorConfig(
        instance=settings.instance,
        deployment=settings.deployment,
        redis_url=settings.redis_url,
        store_socket=settings.store_socket,
        namespace_digest=namespace,
    )


@contextmanager
def opened_consumer(settings: FastPrefillDecodeSettings, cache: EncoderCache) -> Iterator[Consumer]:
    config = config_of(settings, settings.namespace)
    encodes_request = encodes_no_request
    if settings.has_tower:
        encodes_request = LocalEncode(lambda modality: {GRID_FIELD}).encodes_request
    consumer, closers = open_consumer(config, 1, settings.budget_embeds, cache, encodes_request)
    try:
        yield consumer
    finally:
        for closer in closers:
            closer.close()


async def serve(settings: FastPrefillDecodeSettings, stop: StopSignal) -> None:
    """Run until `stop` is set, then let running requests end.

    Raises:
        TriptychError: the engine died.
    """
    loop = asyncio.get_running_loop()
    death: asyncio.Future[str] = loop.create_future()

    def on_death(why: str) -> None:
        loop.call_soon_threadsafe(_set, death, why)

    worker = LoadingWorker(config_of(settings, settings.namespace), 0, "cpu")
    engine = DecodeEngine(worker, settings.token_s, on_death, settings.namespace, settings.encode_s)
    with opened_consumer(settings, engine) as consumer:
        engine.start(consumer)
        try:
            kept = None
            if settings.prefills_only:
                kept = KeptCaches(settings.instance, settings.port, settings.lease_s)
            gate = guarded(_app(engine, settings, kept))
            async with listening(settings.port, gate, settings.address):
                async with (
                    await AsyncBus.connect(
                        settings.redis_url, settings.deployment, client_name=settings.instance
                    ) as bus,
                    Registry(bus).keep_registered(_record(settings)) as registration,
                ):
                    stopped = loop.create_task(stop.wait())
                    ends: set[asyncio.Future[Any]] = {stopped, death}
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    stopped.cancel()
                    if not death.done():
                        await drain(registration, gate, settings.drain_timeout_s)
                if death.done():
                    raise EngineDiedError(death.result())
        finally:
            engine.close()
            worker.close()


def _record(settings: FastPrefillDecodeSettings) -> InstanceRecord:
    return InstanceRecord(
        release=release(),
        instance=settings.instance,
        boot_id=uuid.uuid4().hex,
        role=settings.role,
        kv_transfer=kv_transfer(settings.lease_s) if settings.prefills_only else None,
        url=f"http://{settings.address}:{settings.port}",
        store=settings.store,
        model=MODEL,
        namespace_digest=settings.namespace,
        dtype=DTYPE,
        max_item_embeds=settings.budget_embeds,
        item_limits={Modality.IMAGE: 99} if settings.has_tower else {},
        num_slots=64,
        model_version=settings.model_version,
    )


@asynccontextmanager
async def listening(port: int, app: AsgiApp, address: str = "127.0.0.1") -> AsyncIterator[None]:
    server = ListeningServer(
        uvicorn.Config(
            app,
            host=address,
            port=port,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
        )
    )
    task = asyncio.get_running_loop().create_task(server.serve())
    try:
        await server.listening.wait()
        yield
    finally:
        server.should_exit = True
        await task


def _app(engine: DecodeEngine, settings: FastPrefillDecodeSettings, kept: KeptCaches | None) -> FastAPI:
    app = FastAPI()
    if kept is not None:
        app.include_router(kept.router())

    @app.get("/status")
    async def status() -> dict[str, int]:
        loop = asyncio.get_running_loop()
        counts_future: asyncio.Future[dict[str, int]] = loop.create_future()
        engine.report(lambda counts: _set_soon(loop, counts_future, counts))
        counts = await asyncio.wait_for(counts_future, 5.0)
        return counts if kept is None else counts | {"kept_caches": len(kept)}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        points.reach("dispatch" if kept is None else "prefill", points.RECEIVED)
        exchange = _Exchange(engine, settings.instance, orjson.loads(await request.body()), kept)
        note_served(settings.tally, settings.instance, is_local=exchange.is_local)
        if exchange.body.get("stream"):
            return StreamingResponse(exchange.events(), media_type="text/event-stream; charset=utf-8")
        return await exchange.whole(request)

    return app


def _set(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _set_soon(loop: asyncio.AbstractEventLoop, counts_future: "asyncio.Future[Any]", value: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, and no task waits
        loop.call_soon_threadsafe(_set, counts_future, value)


def _raw_item(url: str, prefix: str) -> Item:
    """Of a part that came with its media: named by its content, as vLLM does."""
    media = base64.b64decode(url.partition(",")[2])
    _, height, width = grid_of(media)
    mm_hash = blake3(media).hexdigest()
    return Item(mm_hash, height * width, prefix_digest(prefix, mm_hash), mm_hash, media)


def _items_of(mm_hash: str, given: dict[str, Any], prefix: str) -> list[Item]:
    """A media item of the prompt, or its pieces."""
    pieces = given["record"]["pieces"]
    if not pieces:
        return [Item(mm_hash, given["num_embeds"], prefix, mm_hash)]
    hashes = piece_hashes(mm_hash, pieces)
    prefixes = [prefix_digest(prefix, each) for each in hashes[:-1]]
    return [
        Item(each, num_rows, own, mm_hash)
        for each, num_rows, own in zip(hashes, pieces, [*prefixes, prefix], strict=True)
    ]


class _Exchange:
    """One request at the engine."""

    def __init__(
        self, engine: DecodeEngine, instance: str, body: dict[str, Any], kept: KeptCaches | None
    ) -> None:
        self.body = body
        self._kept = kept  # None: it answers itself
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[Token | Finished] = asyncio.Queue()
        self._id = f"chatcmpl-{instance}-{uuid.uuid4().hex}"
        prompt = self._prompt()
        self.is_local = any(item.media is not None for item in prompt.items)
        engine.add(prompt)

    def _prompt(self) -> Prompt:
        params = self.body.get("ec_transfer_params")
        given = {item["mm_hash"]: item for item in params["items"]} if params else {}
        items, texts, prefix = [], [], ""
        for message in self.body["messages"]:
            content = message["content"]
            parts: list[dict[str, Any]] = [{"type": "text", "text": content}]
            for part in parts if isinstance(content, str) else content:
                if part["type"] == "text":
                    texts.append(part["text"])
                    prefix = prefix_digest(prefix, part["text"])
                elif part["type"] == "image_url":
                    items.append(_raw_item(part["image_url"]["url"], prefix))
                    prefix = items[-1].prefix
                else:
                    prefix = prefix_digest(prefix, part["uuid"])
                    items += _items_of(part["uuid"], given[part["uuid"]], prefix)
        num_tokens = int(self.body.get("max_tokens", DEFAULT_TOKENS))
        return Prompt(self._id, tuple(items), "\n".join(texts), num_tokens, params, self._send)

    def _send(self, what: Token | Finished) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and no task reads
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, what)

    async def events(self) -> AsyncIterator[bytes]:
        is_done, is_first = False, True
        try:
            while True:
                output = await self._outputs.get()
                if isinstance(output, Finished):
                    is_done = True
                    if output.error is not None:
                        yield _event({"error": {"message": output.error, "type": "x", "code": 500}})
                    else:
                        yield _event(self._chunk({}, "stop"))
                    yield b"data: [DONE]\n\n"
                    return
                if is_first:
                    points.reach("first_token", points.SENDING)
                    is_first = False
                yield _event(self._chunk({"content": f"{output.word} "}, None))
        finally:
            if not is_done:
                points.reach("abort", points.RECEIVED)
                self._engine.abort(self._id)

    async def whole(self, request: Request) -> Response:
        gone = self._loop.create_task(_disconnected(request))
        words: list[str] = []
        try:
            while True:
                next_output = self._loop.create_task(self._outputs.get())
                await asyncio.wait({next_output, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not next_output.done():
                    next_output.cancel()
                    points.reach("abort" if self._kept is None else "abort_prefill", points.RECEIVED)
                    return Response(status_code=499)
                output = next_output.result()
                if isinstance(output, Token):
                    words.append(output.word)
                    continue
                if output.error is not None:
                    return JSONResponse({"error": {"message": output.error, "type": "x", "code": 500}}, 500)
                if self._kept is not None:
                    handover = self._kept.keep(words)
                    points.reach("prefilled", points.SENDING)
                    return JSONResponse(self._completion("") | {"kv_transfer_params": handover})
                points.reach("first_token", points.SENDING)
                return JSONResponse(self._completion(" ".join(words)))
        finally:
            gone.cancel()
            self._engine.abort(self._id)

    def _chunk(self, delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return {
            "id": self._id, "object": "chat.completion.chunk", "created": 1, "model": MODEL,
            "choices": [choice],
        }  # fmt: skip

    def _completion(self, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        return {
            "id": self._id, "object": "chat.completion", "created": 1, "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }  # fmt: skip


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
