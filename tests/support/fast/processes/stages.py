"""A decode instance: its answers are made of a KV cache that it has read from another instance."""

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.support.fast.processes import points
from tests.support.fast.processes.kept_caches import PATH, kv_transfer
from tests.support.fast.processes.prefill_decode import listening
from tests.support.fast.processes.tally import note_held, note_served
from tests.support.fast.processes.tensors import DEFAULT_TOKENS, DIGEST, DTYPE, MODEL, answer_words
from tests.support.fast.prompts import prefix_digest
from triptych_common import release
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_common.runtime import ServiceSettings, StopSignal
from triptych_prefill_decode.http_server import drain, guarded

READ_LIMIT_S = 3.0
NUM_HELD_PREFIXES = 64


class FastDecodeSettings(ServiceSettings):
    port: int
    token_s: float = 0.002
    lease_s: float = 1.0
    tally: Path


async def serve(settings: FastDecodeSettings, stop: StopSignal) -> None:
    """Run until `stop` is set, then let running requests end."""
    instance = _DecodeInstance(settings)
    gate = guarded(instance.app())
    async with (
        listening(settings.port, gate),
        await AsyncBus.connect(settings.redis_url, settings.deployment, client_name=settings.instance) as bus,
        Registry(bus).keep_registered(_record(settings)) as registration,
    ):
        await stop.wait()
        await drain(registration, gate, settings.drain_timeout_s)


def _record(settings: FastDecodeSettings) -> InstanceRecord:
    return InstanceRecord(
        release=release(),
        instance=settings.instance,
        boot_id=uuid.uuid4().hex,
        role=Role.DECODE,
        url=f"http://127.0.0.1:{settings.port}",
        model=MODEL,
        namespace_digest=DIGEST,
        dtype=DTYPE,
        num_slots=64,
        kv_transfer=kv_transfer(settings.lease_s),
    )


class _HeldPrefixes:
    """What the KV cache holds: words of items, by the beginning of the conversation that ends with them."""

    def __init__(self) -> None:
        self._words: OrderedDict[str, list[str]] = OrderedDict()

    def keep(self, body: dict[str, Any], words: list[str]) -> None:
        """`words`: of the whole prompt, those of its items first."""
        prefix, num_items = _prefix_of(body)
        self._words[prefix] = words[:num_items]
        if len(self._words) > NUM_HELD_PREFIXES:
            self._words.popitem(last=False)

    def find(self, body: dict[str, Any]) -> list[str] | None:
        prefix, num_items = _prefix_of(body)
        return self._words.get(prefix) if num_items else []


class _DecodeInstance:
    def __init__(self, settings: FastDecodeSettings) -> None:
        self._name, self._token_s, self._tally = settings.instance, settings.token_s, settings.tally
        self._num_live = 0
        self._held = _HeldPrefixes()

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/status")
        async def status() -> dict[str, int]:
            return {"live": self._num_live}

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            points.reach("decode", points.RECEIVED)
            note_served(self._tally, self._name)
            body = orjson.loads(await request.body())
            words = await self._words(body)
            if words is None:
                code = "kv_load_failed" if body.get("kv_transfer_params") else "prefix_not_held"
                return JSONResponse({"error": {"message": code, "type": "x", "code": code}}, 503)
            if body.get("stream"):
                return StreamingResponse(self._events(words), media_type="text/event-stream")
            points.reach("first_decoded", points.SENDING)
            message = {"role": "assistant", "content": " ".join(words)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return JSONResponse({"id": self._name, "object": "chat.completion", "choices": [choice]})

        return app

    async def _words(self, body: dict[str, Any]) -> list[str] | None:
        """The whole answer; None: nothing here can make it."""
        num_tokens = int(body.get("max_tokens", DEFAULT_TOKENS))
        params = body.get("kv_transfer_params")
        if params is None:
            items = self._held.find(body)
            if items:
                note_held(self._tally, self._name)
            return None if items is None else answer_words(items, _text_of(body), num_tokens)
        url = f"http://{params['remote_host']}:{params['remote_port']}{PATH}/{params['remote_request_id']}"
        try:
            async with httpx.AsyncClient(timeout=READ_LIMIT_S, trust_env=False, verify=False) as http:
                answer = await http.post(url)
        except httpx.HTTPError:
            return None
        if answer.status_code != 200:
            return None
        words: list[str] = answer.json()["words"]
        self._held.keep(body, words)
        return words + [f"w{index}" for index in range(num_tokens - len(words))]

    async def _events(self, words: list[str]) -> AsyncIterator[bytes]:
        self._num_live += 1
        is_done = False
        try:
            points.reach("first_decoded", points.SENDING)  # hosts hold back what comes before a token
            yield _event({"delta": {"role": "assistant", "content": ""}, "index": 0})
            for word in words:
                yield _event({"delta": {"content": f"{word} "}, "index": 0})
                await asyncio.sleep(self._token_s)  # a token takes as long
            yield _event({"delta": {}, "index": 0, "finish_reason": "stop"})
            yield b"data: [DONE]\n\n"
            is_done = True
        finally:
            self._num_live -= 1
            if not is_done:
                points.reach("abort_decode", points.RECEIVED)


def _event(choice: dict[str, Any]) -> bytes:
    chunk = {"id": "x", "object": "chat.completion.chunk", "model": MODEL, "choices": [choice]}
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _text_of(body: dict[str, Any]) -> str:
    return "\n".join(part["text"] for part in _parts_of(body) if part["type"] == "text")


def _prefix_of(body: dict[str, Any]) -> tuple[str, int]:
    """A digest of the prompt up to its last item, and how many items it has."""
    prefix, of_last, num_items = "", "", 0
    for part in _parts_of(body):
        if part["type"] == "text":
            prefix = prefix_digest(prefix, part["text"])
        else:
            prefix = of_last = prefix_digest(prefix, part.get("uuid") or part["image_url"]["url"])
            num_items += 1
    return of_last, num_items


def _parts_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    contents = [message["content"] for message in body["messages"]]
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents]
    return [part for each in parts for part in each]
