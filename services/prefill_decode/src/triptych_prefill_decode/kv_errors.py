"""Error answers of a decode instance that cannot get a prompt's KV cache: 503, with a code.

If the engine fails otherwise before any output: 500 `generation_failed`.

vLLM would answer 500, or end a stream that has begun with an error event. Neither says that the request can
be prefilled again. So the answer is held back until the engine has put out something for the request, and
replaced if that is such an error.

A request that is refused before the engine is asked names a KV cache that its owner keeps for it: the engine
tells the owner to free it. vLLM does so for what it refuses itself, but not for an invalid body.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import orjson
from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError

from triptych_common.domain.errors import RequestError
from triptych_common.runtime.drain import AsgiApp, Message, Receive, Scope, Send
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.kv_failures import MESSAGES, KvFailure

log = get_logger(__name__)

Generate = Callable[..., AsyncIterator[Any]]
Reject = Callable[[str, dict[str, Any]], Awaitable[None]]
PARAMS = "kv_transfer_params"
_CODES = frozenset(KvFailure)
_REFUSALS = (ValueError, VLLMClientError, GracefulHTTPError)  # request faults: the application answers


@dataclass
class AnswerState:
    is_asked: bool = False  # the engine has the request
    body: list[bytes] = field(default_factory=list)  # as it came, until then
    has_output: bool = False  # the engine has put something out for it
    failure: RequestError | None = None  # that replaced the first output
    on_output: Callable[[], Awaitable[None]] | None = None  # called with the first


_state: ContextVar[AnswerState | None] = ContextVar("_state", default=None)


def note_failures(generate: Generate) -> Generate:
    """Wrap `generate` of vLLM's engine client to record requests that end without their KV cache."""

    async def generate_noting(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        state = _state.get() or AnswerState()
        state.is_asked = True
        state.body.clear()
        try:
            async for output in generate(*args, **kwargs):
                failure = failure_of(output)
                if failure is not None:
                    after_output = state.has_output
                    log.warning("request ended: no KV cache", reason=failure.value, after_output=after_output)
                    if not after_output:
                        state.failure = RequestError(503, failure.value, MESSAGES[failure])
                    raise RetryableRequestError(MESSAGES[failure])
                if not state.has_output and _has_failed(output):
                    state.failure = _engine_failed()
                elif not state.has_output:
                    state.has_output = True
                    if state.on_output is not None:
                        await state.on_output()
                yield output
        except Exception as error:
            if not state.has_output and state.failure is None and not isinstance(error, _REFUSALS):
                state.failure = _engine_failed()
            raise

    return generate_noting


def failure_of(output: Any) -> KvFailure | None:
    """KV failure that ended a choice of vLLM's `RequestOutput`; None if none did."""
    for choice in output.outputs:
        if choice.finish_reason == "error" and choice.stop_reason in _CODES:
            return KvFailure(choice.stop_reason)
    return None


def _has_failed(output: Any) -> bool:
    """True if the engine has ended one of the choices with an error."""
    return any(choice.finish_reason == "error" for choice in output.outputs)


def _engine_failed() -> RequestError:
    return RequestError(500, "generation_failed", "the engine failed at this request before its first token")


@dataclass
class _HeldAnswer:
    """Messages of the application, held until the outcome of the request's start is known."""

    state: AnswerState
    send: Send
    held: list[Message] = field(default_factory=list)
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_passing: bool = False
    is_replaced: bool = False

    async def replace(self) -> bool:
        """True if the failure is the answer, which is sent once."""
        if self.is_replaced:
            return True
        if self.state.failure is None or self.is_passing:
            return False
        self.is_replaced = True
        await _answer_failure(self.send, self.state.failure)
        return True

    async def take(self, message: Message) -> None:
        if await self.replace():
            return
        self.held.append(message)
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if self.is_passing or self.state.has_output or is_last:
            await self.release()

    async def release(self) -> None:
        """Pass on held messages, also for answers that show nothing of the first output."""
        self.is_passing = True
        async with self.sending:
            while self.held:
                await self.send(self.held.pop(0))


class KvErrorMiddleware:
    """ASGI middleware in front of vLLM's application, in a decode instance."""

    def __init__(self, app: AsgiApp, reject: Reject) -> None:
        """`reject` is vLLM's; it takes a request id and `kv_transfer_params` and has the KV cache freed."""
        self._app, self._reject = app, reject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":  # others ask the engine for nothing
            await self._app(scope, receive, send)
            return
        state = AnswerState()
        _state.set(state)
        answer = _HeldAnswer(state, send)
        state.on_output = answer.release

        async def receive_kept() -> Message:
            message = await receive()
            if not state.is_asked and message["type"] == "http.request":
                state.body.append(message.get("body", b""))
            return message

        try:
            await self._app(scope, receive_kept, answer.take)
        except Exception:  # the application fails in its own way on a stream that had begun
            if not await answer.replace():
                raise
        finally:
            if not state.is_asked:
                await self._free_kv_cache(b"".join(state.body))

    async def _free_kv_cache(self, body: bytes) -> None:
        """Free the KV cache that `body` names, if any. Idempotent: a KV cache is named once."""
        if PARAMS.encode() not in body:
            return
        with contextlib.suppress(orjson.JSONDecodeError):
            parsed = orjson.loads(body)
            params = parsed.get(PARAMS) if isinstance(parsed, dict) else None
            if isinstance(params, dict) and params.get("do_remote_prefill"):
                await self._reject(f"rejected-{uuid.uuid4().hex}", params)


async def _answer_failure(send: Send, failure: RequestError) -> None:
    body = orjson.dumps(failure.body())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": failure.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
