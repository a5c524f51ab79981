"""Prompts longer than the model takes, refused before their media are encoded.

    rows of the items whose sizes are known + 1 > max_model_len     too long, whatever the text is
    bytes of the text + those rows <= max_model_len                 not yet: a token has a byte at least
    between                                                         prefill_decode counts the text's tokens

prefill_decode checks the whole prompt again. Text that callers have tokenized is bounded in the same way.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import ClientSession

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import InstanceRecord
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.endpoints.endpoint import ChatForm
from triptych_gateway.endpoints.table import COUNT_TOKENS, TOKENIZE_PATH
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.content_parts import text_of
from triptych_gateway.upstream_client import UPSTREAM_ERRORS, NotSentError, open_response

log = get_logger(__name__)

# By the form of the chat: a path that counts tokens, and fields that it knows and that shape the prompt.
TOKENIZE = {
    ChatForm.COMPLETIONS: (
        TOKENIZE_PATH,
        (
            "model",
            "tools",
            "chat_template_kwargs",
            "add_generation_prompt",
            "continue_final_message",
            "add_special_tokens",
        ),
    ),
    ChatForm.MESSAGES: (COUNT_TOKENS.path, tuple({**COUNT_TOKENS.passed_fields, "model": None})),
}
# Longer text per token of the limit is not counted: its beginning is too much already.
CHARS_PER_TOKEN = 64
MAX_HEAD_BYTES = 512  # of the answer: the count stands before the tokens
_COUNT = re.compile(rb'"(?:count|input_tokens)" *: *(\d+)')


def too_long(num_tokens: int, max_model_len: int) -> RequestError:
    """Return the 400 with vLLM's text."""
    return RequestError(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at "
        f"least {num_tokens} input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt.",
        "messages",
    )


def check_tokenized_text(num_bytes: int, max_model_len: int | None) -> None:
    """Refuse text to tokenize that exceeds any prompt: its tokens would take all others' time.

    Raises:
        RequestError: 413.
    """
    if max_model_len is not None and num_bytes > CHARS_PER_TOKEN * max_model_len:
        message = f"the text is longer than {max_model_len} tokens can be; send it in parts"
        raise RequestError(413, "prompt_too_large", message)


async def check_prompt_length(
    client: ClientSession,
    record: InstanceRecord,
    request: ChatRequest,
    num_rows: int,
    timeout_s: float,
    on_broke_off: Callable[[InstanceRecord], None],
) -> None:
    """Refuse `request` if its text is known to be too long beside `num_rows`.

    Args:
        on_broke_off: called with `record` if the instance ends while it counts.

    Raises:
        RequestError: 400.
    """
    limit = record.max_model_len
    if "messages" not in request.body:  # no chat that prefill_decode's tokenize route takes
        return
    if limit is None or request.num_prompt_bytes + num_rows <= limit:
        return
    path, names = TOKENIZE[request.endpoint.chat_form]
    body = {name: request.body[name] for name in names if name in request.body}
    body["messages"] = _without_media(request.body["messages"], CHARS_PER_TOKEN * limit)
    try:
        async with asyncio.timeout(timeout_s):
            num_tokens = await _count(client, (record.url or "").rstrip("/") + path, body)
    except UPSTREAM_ERRORS as error:
        if not isinstance(error, NotSentError | TimeoutError):
            on_broke_off(record)
        log.warning(
            "prompt tokens not counted by prefill_decode", instance=record.instance, error=repr(error)
        )
        return
    if num_tokens is not None and num_tokens + num_rows > limit:
        raise too_long(num_tokens + num_rows, limit)


async def _count(client: ClientSession, url: str, body: dict[str, Any]) -> int | None:
    """Count tokens; None if prefill_decode refuses, whose answer to the request then has the reason."""
    answer = await open_response(client, url, orjson.dumps(body))
    try:
        if not answer.ok:
            return None
        head = b""
        while len(head) < MAX_HEAD_BYTES and (chunk := await answer.content.readany()):
            head += chunk
    finally:
        answer.close()
    found = _COUNT.search(head[:MAX_HEAD_BYTES])
    return int(found[1]) if found else None


def _without_media(messages: list[dict[str, Any]], max_chars: int) -> list[dict[str, Any]]:
    """Return messages with up to `max_chars` of their text, which has no more tokens than the whole."""
    kept: list[dict[str, Any]] = []
    left = max_chars
    for message in messages:
        if left <= 0:
            break
        content = message.get("content")
        if isinstance(content, list):
            texts = [text for text in map(text_of, content) if text is not None]
            content = [{"type": "text", "text": text} for text in texts] or ""
            left -= sum(map(len, texts))
        elif isinstance(content, str):
            content = content[:left]
            left -= len(content)
        kept.append({**message, "content": content} if "content" in message else message)
    return kept
