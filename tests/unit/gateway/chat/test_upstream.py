"""What becomes of a prefill_decode that cannot be addressed, and of its error answers."""

import pytest

from triptych_gateway.chat.upstream import UnreachableError, open_answer, upstream_error
from triptych_gateway.upstream_client import new_client


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
        with pytest.raises(UnreachableError), await open_answer(client, url, b"{}", {}, stream=False):
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
