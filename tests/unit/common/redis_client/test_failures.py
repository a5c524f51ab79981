import ssl

import pytest
from redis import exceptions

from triptych_common.domain.errors import BusRefusedError, BusUnavailableError
from triptych_common.redis_client.commands import is_out_of_memory, is_passing, unavailable


def caused(error: BaseException, cause: BaseException) -> BaseException:
    """As redis-py wraps what happened in a handshake."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        exceptions.ConnectionError("Connection closed by server."),
        exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
        exceptions.TimeoutError("Timeout connecting to server"),
        ConnectionResetError(104, "reset"),
        caused(exceptions.ConnectionError("closed"), ssl.SSLEOFError("EOF in a handshake")),
    ],
)
def test_what_passes_by_itself_is_tried_again(error: BaseException) -> None:
    assert is_passing(error)
    assert type(unavailable("publish", error)) is BusUnavailableError


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (exceptions.AuthenticationError("WRONGPASS", status_code="WRONGPASS"), "refused the user name"),
        (exceptions.AuthenticationError("HELLO", status_code="NOAUTH"), "asks for a password"),
        (exceptions.NoPermissionError("this user has no permissions"), "lacks a right: this user has no"),
        (
            caused(exceptions.ConnectionError("x"), exceptions.AuthenticationError("inner")),
            "refused the user name",
        ),
        (caused(exceptions.ConnectionError("x"), ssl.SSLCertVerificationError("expired")), "not trusted"),
        (caused(exceptions.ConnectionError("x"), ssl.SSLError("alert")), "TLS with Redis failed"),
    ],
)
def test_what_an_operator_must_change_is_not_tried_again(error: BaseException, words: str) -> None:
    assert not is_passing(error)
    raised = unavailable("publish", error)
    assert isinstance(raised, BusRefusedError)
    assert words in str(raised)
    assert "TRIPTYCH_REDIS_URL" in str(raised)


@pytest.mark.parametrize(
    "error",
    [
        exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        exceptions.ResponseError("Command # 1 of pipeline caused error: OOM command not allowed when ..."),
    ],
)
def test_full_memory_is_reported_at_once_and_can_pass(error: BaseException) -> None:
    assert is_out_of_memory(error)
    assert not is_passing(error)
    raised = unavailable("publish", error)
    assert type(raised) is BusUnavailableError
    assert "out of memory" in str(raised)


def test_other_answers_keep_their_text() -> None:
    error = exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots")
    assert not is_passing(error)
    assert "publish: MISCONF" in str(unavailable("publish", error))
