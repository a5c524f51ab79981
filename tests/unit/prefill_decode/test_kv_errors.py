"""What an instance that decodes answers, where a prompt's KV cache is not to be had."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from vllm.exceptions import VLLMError, VLLMServerError, VLLMValidationError

from triptych_prefill_decode.kv_errors import KvErrorMiddleware, note_failures
from triptych_vllm_connector.kv_failures import KvFailure

PARAMS = {"do_remote_prefill": True, "remote_request_id": "r"}
START = {"type": "http.response.start", "status": 200, "headers": []}
CREATED = {"type": "http.response.body", "body": b"event: response.created\n\n", "more_body": True}
TOKEN = {"type": "http.response.body", "body": b"data: token\n\n", "more_body": True}
ERROR = {"type": "http.response.body", "body": b'data: {"error": {}}\n\n', "more_body": False}
END = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}


def output(finish_reason: str | None = None, stop_reason: str | None = None) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(finish_reason=finish_reason, stop_reason=stop_reason)])


class Application:
    """Like vLLM's: `before` is sent before the engine is asked, `TOKEN` for each output."""

    def __init__(
        self, outputs: list[Any], before: tuple[Any, ...] = (START,), *, raises: bool = False
    ) -> None:
        self._before = before
        self._raises = raises
        self.sent: list[Any] = []

        async def generate() -> AsyncIterator[Any]:
            for each in outputs:
                if isinstance(each, Exception):
                    raise each
                yield each

        self.rejected: list[dict[str, Any]] = []
        self.asks = True  # the engine, of each request
        self.is_quiet = False  # sends nothing of an output before the end
        self.sent_at_outputs: list[list[Any]] = []
        self.method = "POST"
        self.body = orjson.dumps({"kv_transfer_params": PARAMS})

        self._generate = note_failures(generate)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        for message in self._before:
            await send(message)
        if not self.asks:
            return
        try:
            async for each in self._generate():
                if each.outputs[0].finish_reason == "error":
                    await send(ERROR)
                    return
                self.sent_at_outputs.append(list(self.sent))
                if not self.is_quiet:
                    await send(TOKEN)
            await send(END)
        except (VLLMError, RuntimeError, ValueError):
            if self._raises:
                raise RuntimeError("the response has begun") from None
            await send(ERROR)

    async def answer(self) -> list[Any]:
        async def send(message: Any) -> None:
            self.sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": self.body, "more_body": False}

        async def reject(request_id: str, params: dict[str, Any]) -> None:
            self.rejected.append(params)

        await KvErrorMiddleware(self.app, reject)({"type": "http", "method": self.method}, receive, send)
        return self.sent


async def test_an_answer_passes_as_it_is() -> None:
    application = Application([output(), output("stop")])
    assert await application.answer() == [START, TOKEN, TOKEN, END]
    assert application.rejected == []


@pytest.mark.parametrize("failure", KvFailure)
@pytest.mark.parametrize("before", [(), (START,), (START, CREATED)])
@pytest.mark.parametrize("raises", [False, True])
async def test_without_the_kv_cache_it_is_503_with_a_code(
    failure: KvFailure, before: tuple[Any, ...], raises: bool
) -> None:
    """Whatever the application has sent of a stream by then."""
    application = Application([output("error", failure.value)], before, raises=raises)
    start, body = await application.answer()
    assert start["status"] == 503
    assert orjson.loads(body["body"])["error"]["code"] == failure.value


async def test_what_was_held_goes_with_the_first_output() -> None:
    """Responses begin before the engine is asked; hidden reasoning shows nothing for long."""
    application = Application([output(), output("stop")], (START, CREATED))
    application.is_quiet = True
    assert await application.answer() == [START, CREATED, END]
    assert application.sent_at_outputs == [[START, CREATED]] * 2


async def test_after_the_first_output_the_application_ends_the_stream() -> None:
    sent = await Application([output(), output("error", "kv_load_failed")]).answer()
    assert sent == [START, TOKEN, ERROR]


@pytest.mark.parametrize("before", [(), (START,), (START, CREATED)])
@pytest.mark.parametrize("fault", [output("error"), VLLMServerError("x"), RuntimeError("x")])
async def test_an_engine_that_fails_before_its_first_output_is_500(
    fault: Any, before: tuple[Any, ...]
) -> None:
    """A stream of a response has begun for the application: it would be 200 with an error event."""
    start, body = await Application([fault], before).answer()
    assert start["status"] == 500
    assert orjson.loads(body["body"])["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("fault", [ValueError("x"), VLLMValidationError("x")])
async def test_what_the_engine_refuses_is_the_applications(fault: Exception) -> None:
    assert await Application([fault], ()).answer() == [ERROR]


async def test_an_engine_that_fails_after_its_first_output_ends_the_stream() -> None:
    assert await Application([output(), RuntimeError("x")]).answer() == [START, TOKEN, ERROR]
    assert await Application([output(), output("error")]).answer() == [START, TOKEN, ERROR]


async def test_an_answer_without_the_engine_passes() -> None:
    application = Application([], (START, END))
    assert (await application.answer())[:2] == [START, END]


REFUSED = ({"type": "http.response.start", "status": 400, "headers": []}, END)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (orjson.dumps({"top_logprobs": 1, "kv_transfer_params": PARAMS}), [PARAMS]),
        (orjson.dumps({"kv_transfer_params": {**PARAMS, "do_remote_prefill": False}}), []),
        (orjson.dumps({"kv_transfer_params": 1}), []),
        (b'{"kv_transfer_params": ', []),
        (b"{}", []),
    ],
)
async def test_the_kv_cache_of_a_refused_request_is_freed(body: bytes, expected: list[Any]) -> None:
    """vLLM refuses a body that is not valid before it looks for a KV cache."""
    application = Application([], REFUSED)
    application.asks, application.body = False, body
    assert await application.answer() == list(REFUSED)
    assert application.rejected == expected


async def test_what_is_not_generated_now_is_not_held() -> None:
    """`GET /v1/responses/{id}?stream=true`: what was generated before, and is."""
    application = Application([], (START, CREATED))
    application.asks, application.method = False, "GET"
    assert await application.answer() == [START, CREATED]
