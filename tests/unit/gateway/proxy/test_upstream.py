"""What becomes of a prefill_decode that cannot be addressed, and of its error answers."""

import orjson
import pytest

from triptych_gateway.endpoints.table import FORWARDED, MESSAGES
from triptych_gateway.proxy.upstream import UnreachableError, first_event_error, open_answer, upstream_error
from triptych_gateway.upstream_client import new_client

MAX_BYTES = 1 << 20


@pytest.mark.parametrize(
    "url",
    [
        "http://::1:8100",
        "http://[::1",
        "http://h:abc",
        "http://xn--/",
        "http://\x00",
        "nonsense",
        "ftp://h",
        "",
    ],
)
async def test_a_url_that_is_none_means_unreachable(url: str) -> None:
    async with new_client(1.0, 1.0) as client:
        with (
            pytest.raises(UnreachableError),
            await open_answer(client, url, b"{}", {}, stream=False, max_bytes=MAX_BYTES),
        ):
            pass


def test_upstream_client_errors_pass_server_errors_become_503() -> None:
    body = b'{"error": {"message": "max_tokens too large", "param": "max_tokens", "code": 400}}'
    error = upstream_error(400, body)
    assert (error.status_code, error.message, error.param, error.code) == (
        400,
        "max_tokens too large",
        "max_tokens",
        "invalid_request",
    )
    error = upstream_error(500, b"Traceback: secret path")
    assert error.status_code == 503
    assert "secret" not in error.message


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b'{"error": {"message": "Not Found", "type": "NotFoundError", "param": null, "code": 404}}'),
        (404, b'{"detail": "Not Found"}'),
        (501, b'{"error": {"message": "The model does not support it", "type": "x", "code": 501}}'),
    ],
)
def test_what_the_model_does_not_serve_is_told(status: int, body: bytes) -> None:
    endpoint = next(each for each in FORWARDED if each.path == "/v1/embeddings")
    error = upstream_error(status, body, endpoint)
    assert (error.status_code, error.code, error.param) == (status, "endpoint_not_served", "model")
    assert "/v1/embeddings" in error.message


def test_another_404_is_passed_on() -> None:
    error = upstream_error(404, b'{"error": {"message": "The model `x` does not exist.", "code": 404}}')
    assert (error.status_code, error.code, error.message) == (
        404,
        "invalid_request",
        "The model `x` does not exist.",
    )


def test_a_prompt_that_is_too_long_is_named_by_the_endpoints_own_field() -> None:
    body = b'{"error": {"message": "This model\'s maximum context length is 10 tokens", "code": 400}}'
    endpoint = next(each for each in FORWARDED if each.path == "/v1/completions")
    assert upstream_error(400, body, endpoint).param == "prompt"
    assert upstream_error(400, body).param == "messages"


HIDDEN = (
    "2 validation errors for ChatCompletionStreamResponse\nmodel\n  Field required [type=missing, "
    "input_value={'error': {'message': 'th...am': None, 'code': %d}}, input_type=dict]"
)


@pytest.mark.parametrize(("code", "status"), [(400, 400), (422, 400), (500, 503), (503, 503)])
def test_a_refusal_that_vllms_messages_api_cannot_read_is_one(code: int, status: int) -> None:
    error = first_event_error({"type": "internal_error", "message": HIDDEN % code}, MESSAGES)
    assert error.status_code == status
    assert "validation error" not in error.message


@pytest.mark.parametrize(("code", "status"), [(400, 400), (500, 503), (None, 503), ("x", 503)])
def test_an_error_in_the_first_event(code: object, status: int) -> None:
    assert first_event_error({"message": "m", "code": code}).status_code == status


def test_texts_of_an_error_are_cut_before_anything_looks_at_them() -> None:
    long = {"message": "m" * 60_000, "param": "p" * 60_000, "code": "c" * 60_000}
    error = upstream_error(400, orjson.dumps({"error": long}))
    assert (len(error.message), len(error.param or ""), len(error.code)) == (2000, 300, 300)
    hidden = first_event_error({"message": "input_value={'error': {" * 3000, "code": 400}, MESSAGES)
    assert len(hidden.message) == 2000
