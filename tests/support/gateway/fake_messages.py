"""FAKE: what vLLM's Messages API makes of a chat completion, for the fake prefill_decode."""

import json
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from triptych_common.protocol.item_urls import parse_item_url


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The body as a chat completion's. Images of a tool's result come before the message's own."""
    messages: list[dict[str, Any]] = []
    for message in body["messages"]:
        content = message["content"]
        if isinstance(content, str):
            messages.append(message)
            continue
        own: list[Any] = []
        for block in content:
            if block["type"] == "tool_result":
                inner = block.get("content") or []
                messages.append({"role": "user", "content": [_part(each) for each in inner if each != ""]})
            else:
                own.append(_part(block))
        messages.append({"role": message["role"], "content": own})
    return {**body, "messages": messages}


def _part(block: Any) -> Any:
    if not isinstance(block, dict) or block["type"] != "image":
        return block
    source = block["source"]
    assert source.keys() == {"type", "url"}
    named = parse_item_url(source["url"])
    if named is None or named.data_url is not None:
        url = source["url"] if named is None else named.data_url
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "image_embeds", "image_embeds": None, "uuid": named.item_id}


def as_message(answer: Response) -> Response:
    """The answer to a chat completion as one of the Messages API."""
    if isinstance(answer, StreamingResponse):
        return StreamingResponse(_events(answer.body_iterator), media_type="text/event-stream; charset=utf-8")
    if not isinstance(answer, JSONResponse):
        return answer
    data = json.loads(bytes(answer.body))
    if "error" in data:
        error = {"type": data["error"]["type"], "message": data["error"]["message"]}
        return JSONResponse({"type": "error", "error": error}, answer.status_code)
    (choice,) = data["choices"]
    usage = data["usage"]
    message = {
        "id": data["id"],
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": choice["message"]["content"]}],
        "model": data["model"],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }
    handover = {name: data[name] for name in ("kv_transfer_params",) if name in data}
    return JSONResponse(message | handover)


async def _events(chunks: AsyncIterable[Any]) -> AsyncIterator[bytes]:
    """As vLLM's converter makes them; what it cannot read it answers by an error."""
    async for chunk in chunks:
        data = chunk.removeprefix(b"data: ").strip()
        if not chunk.endswith(b"\n\n"):
            yield b'event: content_block_delta\ndata: {"type": "half an ev'
        elif data == b"[DONE]":
            yield _event("content_block_stop", index=0)
            yield _event(
                "message_delta",
                delta={"stop_reason": "end_turn", "stop_sequence": None},
                usage={"input_tokens": 2, "output_tokens": 1},
            )
            yield _event("message_stop")
        else:
            *good, last = (json.loads(each.removeprefix("data: ")) for each in data.decode().split("\n\n"))
            for each in (*good, last):
                if "error" in each:
                    yield _event("error", error={"type": "internal_error", "message": "no such chunk"})
                    return
                for event in _events_of(each):
                    yield event


def _events_of(chunk: dict[str, Any]) -> list[bytes]:
    delta = chunk["choices"][0]["delta"] if chunk["choices"] else {}
    if "role" in delta:
        message = {
            "id": chunk["id"],
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": chunk["model"],
            "stop_reason": None,
            "usage": {"input_tokens": 2, "output_tokens": 0},
        }
        start = _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        return [_event("message_start", message=message), start]
    text = delta.get("content")
    return (
        [_event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})] if text else []
    )


def _event(name: str, **fields: Any) -> bytes:
    data = json.dumps({"type": name, **fields}, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n".encode()
