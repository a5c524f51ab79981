"""FAKE: a prefill_decode that follows the protocol and computes nothing. Real ones: tests/engine."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.gateway.fake_messages import as_chat, as_message
from tests.support.gateway.fake_responses import FakeResponses
from tests.support.gateway.samples import DIGEST, MODEL
from tests.support.gateway.serving import served
from tests.support.item_records import grid_of_media, grid_of_record
from tests.support.waiting import free_port
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registration, Registry
from triptych_common.protocol.item_record import ItemRecord
from triptych_common.protocol.messages import (
    ECTransferParams,
    EncodeNeeded,
    InstanceRecord,
    KvTransfer,
    Modality,
    Role,
)
from triptych_common.protocol.urls import base_url

USAGE = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
FINGERPRINT = (
    "fp-fake"  # vLLM's: in the event of a stream that tells its usage, else in the ends of its choices
)
POOLING_PATHS = (
    "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
PLACEHOLDER_TOKENS = ("<|image_pad|>", "<|vision_end|>", "<|vision_start|>")


@dataclass
class FakePrefillDecode:
    """Answers with what it was sent: grids of the items, then the last text, word by word.

    `waits_for`: called with the request's parameters before the first token; like the real one, it
    may wait for tensors.
    """

    name: str = "pd-0"
    host: str = "127.0.0.1"
    port: int = field(default_factory=free_port)
    role: Role = Role.PREFILL_DECODE
    digest: str = DIGEST
    behaviour: str = "ok"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)  # of the same requests
    pools: bool = False  # whether it serves `POOLING_PATHS`
    headers: list[dict[str, str]] = field(default_factory=list)
    num_disconnects: int = 0
    num_finished: int = 0
    waits_for: Callable[[ECTransferParams], Any] | None = None
    release: asyncio.Event = field(default_factory=asyncio.Event)
    max_item_embeds: int | None = None
    max_model_len: int | None = None
    tokenized: list[dict[str, Any]] = field(default_factory=list)  # bodies of the tokenize route
    can_tokenize: bool = True
    words: int = 3
    stores_responses: bool = False
    adapters: tuple[str, ...] = ()
    model: str = MODEL
    model_version: str | None = None
    item_limits: dict[Modality, int] = field(default_factory=dict)
    forms: list[dict[str, Any]] = field(default_factory=list)  # with sounds, that it was sent
    registration: Registration | None = None  # while it runs
    boot_id: str = "boot"
    kv_transfer: KvTransfer | None = None
    store: str | None = None

    def record(self) -> InstanceRecord:
        return InstanceRecord(
            instance=self.name,
            boot_id=self.boot_id,
            role=self.role,
            kv_transfer=self.kv_transfer,
            model=self.model,
            adapters=self.adapters,
            item_limits=self.item_limits,
            namespace_digest=self.digest,
            url=base_url(self.host, self.port),
            placeholder_tokens=PLACEHOLDER_TOKENS,
            max_item_embeds=self.max_item_embeds,
            max_model_len=self.max_model_len,
            store=self.store,
            num_slots=8,
            stores_responses=self.stores_responses,
            model_version=self.model_version,
        )

    @asynccontextmanager
    async def running(self, bus: AsyncBus) -> AsyncIterator["FakePrefillDecode"]:
        async with (
            served(self.app(), self.port, self.host),
            Registry(bus).keep_registered(self.record()) as self.registration,
        ):
            yield self

    @asynccontextmanager
    async def running_nowhere(self, bus: AsyncBus) -> AsyncIterator["FakePrefillDecode"]:
        """Registered, without a server."""
        async with Registry(bus).keep_registered(self.record()):
            yield self

    def app(self) -> Starlette:
        """Its routes; Starlette's alone, as a FastAPI application takes 10 ms to build."""
        handlers = {
            "/v1/chat/completions": self._generate,
            "/v1/chat/completions/batch": self._generate,
            "/v1/completions": self._generate,
            "/v1/messages": self._messages,
            "/v1/messages/count_tokens": self._count_tokens,
            "/detokenize": self._detokenize,
            "/v1/audio/transcriptions": self._write_down,
            "/v1/audio/translations": self._write_down,
            "/tokenize": self._tokenize,
            **{path: self._pool for path in POOLING_PATHS if self.pools},
        }
        responses = FakeResponses(
            self._take,
            self._until_ready,
            lambda: self.stores_responses,
            self.release,
            lambda: self.behaviour,
            self._on_disconnect,
            self._finish,
        )
        routes = [Route(path, handler, methods=["POST"]) for path, handler in handlers.items()]
        return Starlette(routes=[*routes, *responses.routes()])

    async def _generate(self, request: Request) -> Response:
        body = await self._take(request)
        if request.url.path == "/v1/completions":  # where messages are a field that nothing reads
            body = {"prompt": "", **{name: each for name, each in body.items() if name != "messages"}}
        elif request.url.path.endswith("/batch"):
            body = {**body, "stream": False}  # a field that vLLM does not read there
        return await self._answer(request, body)

    async def _messages(self, request: Request) -> Response:
        return as_message(await self._answer(request, as_chat(await self._take(request))))

    async def _count_tokens(self, request: Request) -> Response:
        """A word is a token, and so is an item's row."""
        body = await request.json()
        self.tokenized.append(body)
        self.paths.append(request.url.path)
        rows = [item["num_embeds"] for item in (body.get("ec_transfer_params") or {"items": ()})["items"]]
        num_tokens = sum(len(text.split()) for text in _texts(as_chat(body))) + sum(rows)
        return JSONResponse({"input_tokens": num_tokens}, 200 if self.can_tokenize else 503)

    async def _detokenize(self, request: Request) -> Response:
        body = await self._take(request)
        return JSONResponse({"prompt": " ".join(f"token{each}" for each in body["tokens"])})

    async def _pool(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [], "results": [], "sent": await self._take(request)})

    async def _write_down(self, request: Request) -> Response:
        async with request.form() as form:
            sent = {name: await value.read() if isinstance(value, UploadFile) else value
                    for name, value in form.multi_items()}  # fmt: skip
        self.forms.append(sent)
        if sent.get("stream") == "true":
            self.paths.append(request.url.path)
            chunk = {"object": "transcription.chunk", "choices": [{"delta": {"content": "heard"}}]}
            events = (_event(chunk), b"data: [DONE]\n\n")
            return StreamingResponse(iter(events), media_type="text/event-stream")
        return JSONResponse({"text": "heard", "usage": {"type": "duration", "seconds": 1}})

    async def _tokenize(self, request: Request) -> Response:
        """A word is a token."""
        body = await request.json()
        self.tokenized.append(body)
        if not self.can_tokenize:
            return Response("not now", 503)
        tokens = [0] * sum(len(text.split()) for text in _texts(body))
        return JSONResponse(
            {"count": len(tokens), "max_model_len": self.max_model_len or 0, "tokens": tokens}
        )

    def _finish(self, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """What is sent, of a whole answer."""
        return answer

    def _on_disconnect(self) -> None:
        self.num_disconnects += 1

    async def _take(self, request: Request) -> dict[str, Any]:
        """The body of a request, which is remembered."""
        body: dict[str, Any] = await request.json()
        self.bodies.append(body)
        self.paths.append(request.url.path)
        self.headers.append(dict(request.headers))
        return body

    async def _answer(self, request: Request, body: dict[str, Any]) -> Response:
        if self.behaviour == "refuse":
            error = {
                "message": "max_tokens is too large",
                "type": "BadRequestError",
                "param": "max_tokens",
                "code": 400,
            }
            return JSONResponse({"error": error}, 400)
        if self.behaviour == "too_long":
            error = {
                "message": "This model's maximum context length is 100 tokens. However, your prompt contains "
                "at least 101 input tokens, which exceeds this limit even without any output tokens. "
                "Please reduce the length of the input prompt.",
                "type": "BadRequestError",
                "param": "input_tokens",
                "code": 400,
            }
            return JSONResponse({"error": error}, 400)
        if self.behaviour == "fail":
            return Response("Internal Server Error", 500)
        if self.behaviour == "busy":
            return Response("not now", 503)
        if not body.get("stream"):
            if not await self._until_ready(request, body):
                return Response(status_code=499)
            if self.behaviour == "fail_late":
                return Response("Internal Server Error", 500)
            self.num_finished += 1
            return JSONResponse(_completion(body, self._text(body)))
        return StreamingResponse(self._events(request, body), media_type="text/event-stream; charset=utf-8")

    async def _until_ready(self, request: Request, body: dict[str, Any]) -> bool:
        """False: the client went away first."""
        waits: set[asyncio.Task[Any]] = set()
        loop = asyncio.get_running_loop()
        if self.behaviour == "hang":
            waits.add(loop.create_task(self.release.wait()))
        elif self.waits_for is not None and "ec_transfer_params" in body:
            params = ECTransferParams.model_validate_json(json.dumps(body["ec_transfer_params"]))
            waits.add(loop.create_task(self.waits_for(params)))
        if not waits:
            return True
        gone = loop.create_task(_disconnected(request))
        await asyncio.wait({*waits, gone}, return_when=asyncio.FIRST_COMPLETED)
        is_gone = gone.done()
        for task in (*waits, gone):
            task.cancel()
        await asyncio.gather(*waits, gone, return_exceptions=True)
        self.num_disconnects += is_gone
        return not is_gone

    async def _events(self, request: Request, body: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            if not await self._until_ready(request, body):
                return
            if self.behaviour == "error_first":
                yield b'data: {"error": {"message": "Internal server error", "type": "x", "code": 500}}\n\n'
                yield b"data: [DONE]\n\n"
                return
            yield _chunk(body, {"role": "assistant", "content": ""})
            for index, word in enumerate(self._text(body).split(" ")):
                if self.behaviour == "die" and index == 2:
                    yield b'data: {"id": "half an ev'
                    raise ConnectionError("the fake dies")
                if self.behaviour == "error_late" and index == 2:
                    yield _chunk(body, {"content": "last "}) + (
                        b'data: {"error": {"message": "EngineCore died", "type": "x", "code": 500}}\n\n'
                    )
                    yield b"data: [DONE]\n\n"
                    return
                if self.behaviour == "stall" and index == 2:
                    await self.release.wait()
                yield _chunk(body, {"content": word + " "})
                await asyncio.sleep(0)
            tells_usage = (body.get("stream_options") or {}).get("include_usage")
            yield _chunk(body, {}, "stop", fingerprint=None if tells_usage else FINGERPRINT)
            if tells_usage:
                yield _usage_chunk(body)
            yield b"data: [DONE]\n\n"
            self.num_finished += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.num_disconnects += 1
            raise

    def _text(self, body: dict[str, Any]) -> str:
        params = body.get("ec_transfer_params") or {"items": ()}
        records = {item["mm_hash"]: item["record"] for item in params["items"]}
        grids = [
            "x".join(map(str, _grid(part, records)))
            for message in _messages(body)
            if isinstance(message, dict) and isinstance(message.get("content"), list)
            for part in message["content"]
            if isinstance(part, dict) and part["type"].endswith(("_embeds", "_url"))
        ]
        return " ".join([*grids, *(f"word{index}" for index in range(self.words))])


def _messages(body: dict[str, Any]) -> list[Any]:
    """None where they are no list, as in a completion that has a field of that name."""
    messages = body.get("messages")
    return messages if isinstance(messages, list) else []


def _texts(body: dict[str, Any]) -> list[str]:
    texts: list[Any] = [body.get("prompt")]
    for message in _messages(body):
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [content]
        texts += [part.get("text") if isinstance(part, dict) else part for part in parts]
    return [text for text in texts if isinstance(text, str)]


def _grid(part: dict[str, Any], records: dict[str, Any]) -> list[float]:
    """Of the item's record, or of raw media: the same."""
    name: str = part["type"]
    if name.endswith("_embeds"):
        return grid_of_record(ItemRecord.model_validate(records[part["uuid"]]))
    media = base64.b64decode(part[name]["url"].partition(",")[2])
    return [*grid_of_media(media, Modality(name.removesuffix("_url")))]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _completion(body: dict[str, Any], text: str) -> dict[str, Any]:
    written = {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text}}
    wanted = body.get("n")
    num_choices = wanted if isinstance(wanted, int) and wanted > 0 else 1
    return {
        "id": "chatcmpl-x",
        "object": "text_completion" if "prompt" in body else "chat.completion",
        "created": 1,
        "model": body.get("model") or MODEL,
        "choices": [{"index": index, **written, "finish_reason": "stop"} for index in range(num_choices)],
        "usage": USAGE,
    }


def _chunk(
    body: dict[str, Any],
    delta: dict[str, Any],
    finish_reason: str | None = None,
    fingerprint: str | None = None,
) -> bytes:
    written = {"text": delta.get("content", "")} if "prompt" in body else {"delta": delta}
    chunk = {
        "id": "chatcmpl-x",
        "object": "text_completion" if "prompt" in body else "chat.completion.chunk",
        "created": 1,
        "model": body.get("model") or MODEL,
        "choices": [{"index": 0, **written, "finish_reason": finish_reason}],
    } | ({} if fingerprint is None else {"system_fingerprint": fingerprint})
    return _event(chunk)


def _event(chunk: dict[str, Any]) -> bytes:
    """Without spaces, as vLLM writes it."""
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def _usage_chunk(body: dict[str, Any]) -> bytes:
    model = body.get("model") or MODEL
    chunk = {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 1, "model": model}
    told = {"choices": [], "usage": USAGE, "system_fingerprint": FINGERPRINT}
    return _event(chunk | told)


async def send_encode_needed(bus: AsyncBus, params: ECTransferParams, instance: str) -> None:
    """What prefill_decode sends when the store lacks the request's first item."""
    item = params.items[0]
    await bus.publish(
        bus.names.encode_results(params.gateway),
        EncodeNeeded(
            request_id=params.request_id,
            item_index=item.item_index,
            mm_hash=item.mm_hash,
            prefill_decode=instance,
            reason="absent",
        ),
    )
