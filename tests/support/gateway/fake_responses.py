"""FAKE: the Responses API of a stand-in prefill_decode, with vLLM's store of responses in memory."""

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from PIL import Image
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.gateway.samples import MODEL
from tests.support.item_records import grid_of_record
from triptych_common.protocol.item_record import ItemRecord
from triptych_common.protocol.item_urls import parse_item_url

USAGE = {"input_tokens": 2, "output_tokens": 1, "total_tokens": 3}
Take = Callable[[Request], Awaitable[dict[str, Any]]]
UntilReady = Callable[[Request, dict[str, Any]], Awaitable[bool]]


@dataclass
class FakeResponses:
    """Answers with the sizes of the conversation's images, then words. `take` remembers a request's body."""

    take: Take
    until_ready: UntilReady
    stores: Callable[[], bool]
    release: asyncio.Event  # background responses wait for it where the behaviour is `hang`
    behaviour: Callable[[], str]
    on_disconnect: Callable[[], None]
    finish: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]  # a body and its answer: what is sent
    stored: dict[str, dict[str, Any]] = field(default_factory=dict)
    messages: dict[str, list[Any]] = field(default_factory=dict)
    events: dict[str, list[bytes]] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/{response_id}", self.retrieve),
            Route("/v1/responses/{response_id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        body = await self.take(request)
        previous = body.get("previous_response_id")
        if previous is not None and previous not in self.stored:
            return _not_found(previous)
        if not isinstance(body["input"], str | list):
            return _error(400, "input is not valid", "input")
        before = [each for each in self.messages.get(previous or "", ()) if each.get("role") != "system"]
        messages = [*before, *_inputs(body)]
        try:
            text = self._text(body, messages)
        except KeyError as error:
            return _error(400, f"the URL of a media item that the request does not have: {error}", "messages")
        is_stored = self.stores() and body.get("store", True)
        response = _response(body, text)
        if body.get("background"):
            if not is_stored:
                return _error(400, "This vLLM engine does not support `store=True`", "background")
            return self._in_background(body, messages, response)
        if body.get("stream"):
            return StreamingResponse(
                self._stream(request, body, messages, response, is_stored=is_stored),
                media_type="text/event-stream",
            )
        if not await self.until_ready(request, body):
            return Response(status_code=499)
        if is_stored:
            self.stored[response["id"]], self.messages[response["id"]] = response, messages
        return JSONResponse(self.finish(body, response))

    async def retrieve(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        response = self.stored.get(response_id)
        if response is None:
            return _not_found(response_id)
        if request.query_params.get("stream") not in ("true", "True", "1"):
            return JSONResponse(response)
        after = int(request.query_params.get("starting_after", "-1"))
        events = self.events[response_id][after + 1 :]
        return Response(b"".join(events), media_type="text/event-stream")

    async def cancel(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        response = self.stored.get(response_id)
        if response is None:
            return _not_found(response_id)
        if response["status"] not in ("queued", "in_progress"):
            return _error(400, "Cannot cancel a synchronous response.", "response_id")
        response["status"] = "cancelled"
        self.tasks[response_id].cancel()
        return JSONResponse(response)

    def _in_background(self, body: dict[str, Any], messages: list[Any], response: dict[str, Any]) -> Response:
        queued = {**response, "status": "queued", "output": [], "usage": None}
        response_id = response["id"]
        self.stored[response_id], self.messages[response_id] = queued, messages

        async def work() -> None:
            if self.behaviour() == "hang":
                await self.release.wait()
            self.stored[response_id].update(response)

        self.tasks[response_id] = asyncio.get_running_loop().create_task(work())
        if not body.get("stream"):
            return JSONResponse(queued)
        self.events[response_id] = list(_events(response))
        return Response(b"".join(self.events[response_id]), media_type="text/event-stream")

    async def _stream(
        self,
        request: Request,
        body: dict[str, Any],
        messages: list[Any],
        response: dict[str, Any],
        *,
        is_stored: bool,
    ) -> AsyncIterator[bytes]:
        try:
            if not await self.until_ready(request, body):
                return
        except asyncio.CancelledError:
            self.on_disconnect()
            raise
        for number, event in enumerate(_events(response)):
            if self.behaviour() == "die" and number == 3:
                raise ConnectionError("the fake dies")
            yield event
            await asyncio.sleep(0)
        if is_stored:
            self.stored[response["id"]], self.messages[response["id"]] = response, messages

    def _text(self, body: dict[str, Any], messages: list[Any]) -> str:
        items = (body.get("ec_transfer_params") or {"items": ()})["items"]
        records = {item["mm_hash"]: item["record"] for item in items}
        grids = ["x".join(map(str, _grid(url, records))) for url in _image_urls(messages)]
        return " ".join([*grids, "word0", "word1"])


def _inputs(body: dict[str, Any]) -> list[Any]:
    given = body["input"]
    return given if isinstance(given, list) else [{"role": "user", "content": given}]


def _image_urls(messages: list[Any]) -> Iterator[str]:
    for message in messages:
        for name in ("content", "output"):
            for part in message.get(name) if isinstance(message.get(name), list) else ():
                if part["type"] == "input_image":
                    yield part["image_url"]


def _grid(url: str, records: dict[str, Any]) -> list[float]:
    """Of an item's record, or of raw media: the same."""
    named = parse_item_url(url)
    if named is not None and named.data_url is None:
        return grid_of_record(ItemRecord.model_validate(records[named.item_id]))
    data_url = url if named is None or named.data_url is None else named.data_url
    with Image.open(io.BytesIO(base64.b64decode(data_url.partition(",")[2]))) as image:
        return [1, image.height, image.width]


def _response(body: dict[str, Any], text: str) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
    ]
    message = {
        "id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content,
    }  # fmt: skip
    return {
        "id": body["request_id"],
        "object": "response",
        "created_at": 1,
        "model": body.get("model") or MODEL,
        "status": "completed",
        "output": [message],
        "previous_response_id": body.get("previous_response_id"),
        "background": bool(body.get("background")),
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "tools": [],
        "usage": USAGE,
    }


def _events(response: dict[str, Any]) -> Iterator[bytes]:
    """As vLLM writes them; the first two and the last hold the response."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    (message,) = response["output"]
    place = {"item_id": message["id"], "output_index": 0, "content_index": 0}
    text = message["content"][0]["text"]
    datas: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": {**message, "content": []}},
        *(
            {"type": "response.output_text.delta", **place, "delta": word, "logprobs": []}
            for word in text.split(" ")
        ),
        {"type": "response.output_text.done", **place, "text": text, "logprobs": []},
        {"type": "response.output_item.done", "output_index": 0, "item": message},
        {"type": "response.completed", "response": response},
    ]
    for number, data in enumerate(datas):
        line = json.dumps({**data, "sequence_number": number}, separators=(",", ":"))
        yield f"event: {data['type']}\ndata: {line}\n\n".encode()


def _not_found(response_id: str) -> Response:
    return _error(404, f"Response with id '{response_id}' not found.", "response_id")


def _error(status: int, message: str, param: str) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": status}
    return JSONResponse({"error": error}, status)
