"""FAKE: instances that prefill, and instances that decode what one of them has prefilled."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode, _chunk
from triptych_common.protocol.messages import KvTransfer, Role
from triptych_common.runtime import DRAINING_HEADER

KV_TRANSFER = KvTransfer(connector="FakeConnector", compatibility="fits", lease_s=30.0)
ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
_REFUSALS = {"lost": "kv_load_failed", "lacks": "prefix_not_held", "dead": "engine_dead"}  # codes
_numbers = count(1)


@dataclass
class FakePrefill(FakePrefillDecode):
    """Keeps the KV cache of each request under a handle, and tells it.

    behaviour, besides: `no_handover`, it keeps none.
    """

    name: str = "p-0"
    role: Role = Role.PREFILL
    kv_transfer: KvTransfer | None = KV_TRANSFER
    kept: dict[str, list[Any]] = field(default_factory=dict)  # the messages or the prompt, by handle
    before_answer: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: it is still at work

    def __post_init__(self) -> None:
        self.before_answer.set()

    async def _answer(self, request: Request, body: dict[str, Any]) -> Response:
        answer = await super()._answer(request, body)
        if answer.status_code != 200 or "kv_transfer_params" not in body:
            return answer
        await self.before_answer.wait()
        return JSONResponse(self._finish(body, json.loads(bytes(answer.body))))

    def _finish(self, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        if self.behaviour == "no_handover" or "kv_transfer_params" not in body:
            return answer
        assert body["kv_transfer_params"] == ASKED, body
        handle = f"{self.name}-{next(_numbers)}"
        self.kept[handle] = _prompt_of(body)
        given = {"remote_engine_id": self.name, "remote_request_id": handle, "remote_block_ids": [[1]]}
        params = {**ASKED, "do_remote_prefill": True, "do_remote_decode": False, **given}
        return answer | {"kv_transfer_params": params}


@dataclass
class FakeDecode(FakePrefillDecode):
    """Takes KV caches of `prefills`, once each.

    behaviour, besides: `lost`, it cannot read the KV cache; `lacks`, it would have to compute an item;
    `dead`, a 503 for another reason; `drains`, it takes nothing more; `quiet`, no token follows its first
    event before `release`; `leaks`, its answer tells what engines tell each other.
    """

    name: str = "d-0"
    role: Role = Role.DECODE
    kv_transfer: KvTransfer | None = KV_TRANSFER
    prefills: list[FakePrefill] = field(default_factory=list)
    holds_items: bool = False  # that it is sent without a KV cache
    taken: list[str] = field(default_factory=list)  # handles

    async def _take(self, request: Request) -> dict[str, Any]:
        body = await super()._take(request)
        if request.url.path == "/v1/responses" and "kv_transfer_params" in body:
            self._read(body)
        return body

    def _read(self, body: dict[str, Any]) -> bool:
        """Whether the KV cache was there. It is gone then."""
        params = body["kv_transfer_params"]
        kept = next((each.kept for each in self.prefills if each.name == params["remote_engine_id"]), {})
        prompt = kept.pop(params["remote_request_id"], None)
        if prompt is None:
            return False
        assert prompt == _prompt_of(body), (prompt, body)
        self.taken.append(params["remote_request_id"])
        return True

    async def _answer(self, request: Request, body: dict[str, Any]) -> Response:
        params = body.get("kv_transfer_params")
        if params is None:
            if body.get("ec_transfer_params") and not self.holds_items:
                return _error(503, "prefix_not_held")
            return await super()._answer(request, body)
        if self.behaviour == "drains":
            return JSONResponse({"error": {"message": "draining"}}, 503, {DRAINING_HEADER: "1"})
        if not self._read(body) or self.behaviour in _REFUSALS:
            return _error(503, _REFUSALS.get(self.behaviour, "kv_taken"))
        if self.behaviour == "quiet":
            return StreamingResponse(self._quiet(request, body), media_type="text/event-stream")
        answer = await super()._answer(request, body)
        if self.behaviour == "leaks":
            return JSONResponse({"id": "x", "choices": [{"index": 0}], "kv_transfer_params": params})
        return answer

    async def _quiet(self, request: Request, body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield _chunk(body, {"role": "assistant", "content": ""})
        await self.release.wait()
        async for event in self._events(request, body):
            yield event


def _error(status: int, code: str) -> Response:
    return JSONResponse({"error": {"message": code, "type": "x", "param": None, "code": code}}, status)


def _prompt_of(body: dict[str, Any]) -> list[Any]:
    """What shapes it."""
    names = ("messages", "prompt", "input", "instructions", "system", "tools")
    items = [each["mm_hash"] for each in (body.get("ec_transfer_params") or {"items": ()})["items"]]
    return [*(body.get(name) for name in names), items]
