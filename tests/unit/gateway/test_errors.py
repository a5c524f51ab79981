"""OpenAI's error format, as an answer and as an event."""

import orjson
import pytest

from triptych_common.domain.errors import RequestError
from triptych_gateway.chat.sse import error_in_first_event
from triptych_gateway.errors import error_event, error_response


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


def test_event() -> None:
    event = error_event(RequestError(503, "c", "m"))
    assert event.endswith(b"\n\n")
    assert error_in_first_event(event) is not None
