"""FAKES: an encoder and a prefill_decode that speak the protocol and compute nothing.

They let the gateway's own behaviour be tested without engines. What real engines do is tested in
tests/engine.
"""

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import uvicorn
from fastapi import FastAPI, Request
from PIL import Image
from starlette.responses import JSONResponse, Response, StreamingResponse

from triptych_cli.system.machine import free_ports
from triptych_common.bus import AsyncBus, Delivery
from triptych_common.coordination import Registry, SingleFlight, Start
from triptych_common.coordination.single_flight import key_of
from triptych_common.protocol.messages import (
    ECTransferParams,
    EncodeCompleted,
    EncodeFailed,
    EncodeJob,
    EncodeNeeded,
    EncoderCacheMetadata,
    FailureKind,
    InstanceRecord,
    Message,
    Requester,
    Role,
)
from triptych_common.protocol.names import ENCODERS_GROUP
from triptych_common.protocol.urls import base_url

MODEL = "fake-vl"
DIGEST = "f" * 64
TAKEOVER_IDLE_MS = 500
PREFETCH = 8


async def until(condition: Callable[[], object], limit_s: float = 5.0) -> None:
    """Return once `condition` holds; for what a test can only look at."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def until_async(condition: Callable[[], Awaitable[object]], limit_s: float = 5.0) -> None:
    """Return once `condition()` gives something true; for what a test can only ask."""
    async with asyncio.timeout(limit_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def free_port() -> int:
    return free_ports(1)[0]


class QuietServer(uvicorn.Server):
    """uvicorn without signal handlers, for a test's own event loop."""

    @contextmanager
    def capture_signals(self) -> Any:
        yield


@asynccontextmanager
async def served(
    app: Any,
    port: int,
    host: str = "127.0.0.1",
    http: type[asyncio.Protocol] | Literal["auto"] = "auto",
) -> AsyncIterator[QuietServer]:
    server = QuietServer(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            http=http,
            lifespan="off",
            log_config=None,
            ws="none",
            timeout_graceful_shutdown=1,
        )
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(server.serve())
        await until(lambda: server.started)
        try:
            yield server
        finally:
            server.should_exit = True
            await asyncio.wait({task}, timeout=3)


@dataclass
class FakeEncoder:
    """Takes jobs; the sizes are the picture's size; 'the tensor' is the mm_hash in `sealed`."""

    bus: AsyncBus
    name: str = "encoder-0"
    digest: str = DIGEST
    jobs: list[EncodeJob] = field(default_factory=list)
    traceparents: list[str | None] = field(default_factory=list)
    media: list[bytes] = field(default_factory=list)
    sealed: set[str] = field(default_factory=set)
    failures: list[FailureKind] = field(default_factory=list)  # of the next jobs, before their metadata
    fail_after_metadata: FailureKind | None = None
    dropped: list[Start] = field(default_factory=list)  # jobs that were not to be done
    before_start: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: jobs wait here
    before_metadata: asyncio.Event = field(default_factory=asyncio.Event)
    before_seal: asyncio.Event = field(default_factory=asyncio.Event)
    num_encodes: int = 0
    mute_jobs: int = 0  # so many jobs are done without a word to anybody, and Redis loses the flight
    is_unheard: bool = False  # what it tells gateways is lost
    vanishing_jobs: int = 0  # so many are taken off the stream, and that is all
    vanished: list[EncodeJob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before_start.set()
        self.before_metadata.set()
        self.before_seal.set()

    def record(self) -> InstanceRecord:
        return InstanceRecord(
            instance=self.name,
            boot_id="boot",
            role=Role.ENCODE,
            model=MODEL,
            namespace_digest=self.digest,
            num_slots=4,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeEncoder"]:
        async with Registry(self.bus).keep_registered(self.record()), asyncio.TaskGroup() as group:
            task = group.create_task(self._consume(group))
            try:
                yield self
            finally:
                task.cancel()
                self.before_start.set()
                self.before_metadata.set()
                self.before_seal.set()

    async def _consume(self, group: asyncio.TaskGroup) -> None:
        stream = self.bus.names.encode_jobs(self.digest)
        async with self.bus.consumer(
            stream, group=ENCODERS_GROUP, consumer=self.name, prefetch=PREFETCH, min_idle_ms=TAKEOVER_IDLE_MS
        ) as consumer:
            async for delivery in consumer:
                group.create_task(self._handle(delivery))

    async def _handle(self, delivery: Delivery) -> None:
        job, flights = delivery.envelope.message, SingleFlight(self.bus)
        assert isinstance(job, EncodeJob)
        await self.before_start.wait()
        if self.vanishing_jobs:
            self.vanishing_jobs -= 1
            self.vanished.append(job)
            await delivery.ack()
            return
        start, _ = await flights.start(
            job, delivery.entry_id, self.name, lease_s=TAKEOVER_IDLE_MS / 1000, ttl_s=10
        )
        if start is Start.STARTED:
            self.jobs.append(job)
            self.traceparents.append(delivery.envelope.traceparent)
            await self._work(flights, job, delivery.envelope.blob)
        else:
            self.dropped.append(start)
        await delivery.ack()

    async def _work(self, flights: SingleFlight, job: EncodeJob, blob: bytes | None) -> None:
        await self.before_metadata.wait()
        if self.mute_jobs:
            self.mute_jobs -= 1
            self.num_encodes += 1
            self.sealed.add(job.mm_hash)
            await self.bus.client.delete(self.bus.names.inflight(job.mm_hash))
            return
        if self.failures:
            await self._fail(flights, job, self.failures.pop(0))
            return
        media = blob if blob is not None else await self._fetch(job)
        self.media.append(media)
        try:
            with Image.open(io.BytesIO(media)) as image:
                width, height = image.size
        except Exception:  # Pillow fails at hostile bytes in many ways
            await self._fail(flights, job, FailureKind.BAD_MEDIA)
            return
        is_known = job.mm_hash in self.sealed
        metadata = self.metadata(job, width, height).model_copy(update={"sealed": is_known})
        told = await self._announce(flights, metadata, ())
        if not is_known:
            await self.before_seal.wait()
            if self.fail_after_metadata is not None:
                await self._fail(flights, job, self.fail_after_metadata)
                return
            self.num_encodes += 1
            self.sealed.add(job.mm_hash)
        told = await self._announce(flights, metadata.model_copy(update={"sealed": True}), told)
        completed = EncodeCompleted(job_id=job.job_id, mm_hash=job.mm_hash, encoder=self.name, encode_s=0.001)
        await self._tell(told, completed)
        await flights.finish(job.mm_hash, job.job_id, [key_of(each) for each in told])

    def metadata(self, job: EncodeJob, width: int, height: int) -> EncoderCacheMetadata:
        """What it says of a picture of that size; nobody is named in it yet."""
        return EncoderCacheMetadata(
            job_id=job.job_id,
            mm_hash=job.mm_hash,
            modality=job.modality,
            num_embeds=width * height,
            width=4,
            dtype="float32",
            num_bytes=width * height * 16,
            placeholder_metadata={"image_grid_thw": [1, height, width]},
            encoder=self.name,
            store="store-0",
            sealed=False,
            requesters=(),
        )

    async def _announce(
        self, flights: SingleFlight, metadata: EncoderCacheMetadata, told: tuple[Requester, ...]
    ) -> tuple[Requester, ...]:
        """To those who wait and have not heard it. Returns who has."""
        waiting = await flights.announce(metadata)
        new = tuple(each for each in waiting or () if each not in told)
        if new:
            message = metadata.model_copy(update={"requesters": new})
            await self._tell(new, message)
            for instance in {requester.prefill_decode for requester in new}:
                await self.bus.publish(self.bus.names.metadata(instance), message)
        return told + new

    async def _fail(self, flights: SingleFlight, job: EncodeJob, kind: FailureKind) -> None:
        failure = EncodeFailed(
            job_id=job.job_id, mm_hash=job.mm_hash, encoder=self.name, kind=kind, detail="a fake failure"
        )
        waiting = await flights.fail(failure)
        await self._tell(job.requesters if waiting is None else waiting, failure)

    async def _fetch(self, job: EncodeJob) -> bytes:
        assert job.media_url is not None
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(job.media_url)
            answer.raise_for_status()
            return answer.content

    async def _tell(self, requesters: tuple[Requester, ...], message: Message) -> None:
        for gateway in {requester.gateway for requester in requesters if not self.is_unheard}:
            await self.bus.publish(self.bus.names.encode_results(gateway), message)


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

    def record(self) -> InstanceRecord:
        return InstanceRecord(
            instance=self.name,
            boot_id="boot",
            role=self.role,
            model=MODEL,
            namespace_digest=self.digest,
            url=base_url(self.host, self.port),
            max_item_embeds=self.max_item_embeds,
            max_model_len=self.max_model_len,
            num_slots=8,
        )

    @asynccontextmanager
    async def running(self, bus: AsyncBus) -> AsyncIterator["FakePrefillDecode"]:
        async with served(self.app(), self.port, self.host), Registry(bus).keep_registered(self.record()):
            yield self

    @asynccontextmanager
    async def running_nowhere(self, bus: AsyncBus) -> AsyncIterator["FakePrefillDecode"]:
        """Registered, but nobody listens."""
        async with Registry(bus).keep_registered(self.record()):
            yield self

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            return await self._answer(request, body)

        @app.post("/tokenize")
        async def tokenize(request: Request) -> Response:
            """A word is a token."""
            body = await request.json()
            self.tokenized.append(body)
            if not self.can_tokenize:
                return Response("not now", 503)
            tokens = [0] * sum(len(text.split()) for text in _texts(body))
            answer = {"count": len(tokens), "max_model_len": self.max_model_len or 0, "tokens": tokens}
            return JSONResponse(answer)

        return app

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
            yield _chunk(body, {}, "stop")
            yield b"data: [DONE]\n\n"
            self.num_finished += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.num_disconnects += 1
            raise

    def _text(self, body: dict[str, Any]) -> str:
        grids = [
            "x".join(map(str, _grid(part)))
            for message in body["messages"]
            if isinstance(message.get("content"), list)
            for part in message["content"]
            if isinstance(part, dict) and part["type"] in ("image_embeds", "image_url")
        ]
        return " ".join([*grids, *(f"word{index}" for index in range(self.words))])


def _texts(body: dict[str, Any]) -> list[str]:
    texts: list[str] = []
    for message in body["messages"]:
        content = message.get("content")
        texts += [content] if isinstance(content, str) else [part.get("text", "") for part in content or ()]
    return texts


def _grid(part: dict[str, Any]) -> list[int]:
    """Of metadata, or of raw media: the same."""
    if part["type"] == "image_embeds":
        return list(part["image_embeds"]["image_grid_thw"])
    media = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    with Image.open(io.BytesIO(media)) as image:
        return [1, image.height, image.width]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _completion(body: dict[str, Any], text: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-x",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def _chunk(body: dict[str, Any], delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    chunk = {
        "id": "chatcmpl-x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": body["model"],
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def say_encode_needed(bus: AsyncBus, params: ECTransferParams, instance: str) -> None:
    """What prefill_decode says when the store lacks the request's first item."""
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
