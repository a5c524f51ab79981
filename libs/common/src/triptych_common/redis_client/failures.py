"""Meaning of redis-py's errors: retry, wait, or change a setting; as text for people, without secrets."""

import ssl
from collections.abc import Iterator

from redis import exceptions

from triptych_common.domain.errors import BusRefusedError, BusUnavailableError

SETTING = "TRIPTYCH_REDIS_URL"
PASSING = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ClusterError, OSError)
_CUT_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError)


def is_passing(error: BaseException) -> bool:
    """Return whether the same command can work in a moment, on a new connection."""
    if refusal(error) is not None:
        return False
    return isinstance(error, PASSING)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Redis refuses writes for lack of memory; reads, acks and deletions still work."""
    return isinstance(error, exceptions.OutOfMemoryError) or "OOM command not allowed" in str(error)


def refusal(error: BaseException) -> str | None:
    """Return why Redis will refuse until a setting is changed, or None."""
    for cause in _chain(error):
        if isinstance(cause, exceptions.NoPermissionError):
            return f"the user of {SETTING} lacks a right: {cause}"
        if isinstance(cause, exceptions.AuthenticationError):
            if getattr(cause, "status_code", None) == "NOAUTH":
                return f"Redis asks for a password, and {SETTING} has none"
            return f"Redis refused the user name or password in {SETTING}"
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = getattr(cause, "verify_message", cause)
            return f"Redis' certificate is not trusted ({why}): see ssl_ca_certs in {SETTING}"
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, _CUT_OFF):
            why = getattr(cause, "reason", None) or cause
            return f"TLS with Redis failed ({why}): see the ssl_ options in {SETTING}"
    return None


def unavailable(action: str, error: BaseException) -> BusUnavailableError:
    if (reason := refusal(error)) is not None:
        return BusRefusedError(f"{action}: {reason}")
    if is_out_of_memory(error):
        return BusUnavailableError(f"{action}: Redis is out of memory (maxmemory), and takes nothing new")
    return BusUnavailableError(f"{action}: {str(error) or type(error).__name__}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and its causes. redis-py wraps a handshake's errors, not always as the cause."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
