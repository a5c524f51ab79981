"""OpenAI's and Anthropic's error formats, as an answer and as an event."""

import orjson
import pytest

from triptych_common.domain.errors import RequestError
from triptych_gateway.endpoints.endpoint import ChatForm
from triptych_gateway.errors import error_event, error_response
from triptych_gateway.proxy.sse import error_in_first_event


def test_format() -> None:
    response = error_response(RequestError(400, "c", "m", "messages[0]"))
    assert orjson.loads(response.body) == {
        "error": {"message": "m", "type": "invalid_request_error", "param": "messages[0]", "code": "c"}
    }
    assert "retry-after" not in response.headers


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after(status: int) -> None:
    assert error_response(RequestError(status, "c", "m")).headers["retry-after"] == "1"
    assert error_response(RequestError(status, "c", "m", retry_after_s=2.5)).headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "timeout_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (501, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_anthropics_format(status: int, kind: str) -> None:
    error = RequestError(status, "c", "m", "messages")
    response = error_response(error, {"X": "y"}, ChatForm.MESSAGES)
    wanted = {"type": "error", "error": {"type": kind, "message": "m"}}
    assert (response.status_code, orjson.loads(response.body)) == (status, wanted)
    assert ("retry-after" in response.headers) == (status in (429, 503))
    name, data = error_event(error, ChatForm.MESSAGES).split(b"\n", 1)
    assert name == b"event: error"
    assert orjson.loads(data.removeprefix(b"data: ")) == wanted
    assert error_in_first_event(error_event(error, ChatForm.MESSAGES)) == wanted["error"]
