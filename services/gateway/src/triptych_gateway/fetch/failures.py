"""Reasons of failed fetches, and the errors for callers.

    FetchError
     ├─ MalformedUrlError       not a URL that could be fetched
     ├─ UrlRefusedError         a rule forbids the URL, or the address that it leads to
     ├─ ContentTooLargeError    more bytes than an item may have
     ├─ ServerRefusedError      the server's answer will be the same next time
     ├─ ServerFailedError       the same request may succeed: it is tried again
     │   └─ ServerStalledError  not connected, or nothing sent, for too long
     ├─ FetchTimeoutError       the time for all attempts together is over
     ├─ FetchBusyError          too many other downloads until then
     └─ NoResourcesError        this machine lacks files or memory

What a URL's server does is the request's fault: 400, as OpenAI's own API answers. A 5xx would count against
the gateway, and any caller could cause it. No text holds a path, a query or an address.
"""

from typing import ClassVar

from triptych_common.domain.errors import RequestError, TriptychError
from triptych_common.protocol.messages import Modality
from triptych_gateway.errors import unavailable


class FetchError(TriptychError):
    """Failure whose `reason`, which callers see, completes `<item> cannot be fetched: …`."""

    outcome: ClassVar[str] = "failed"  # in metrics and traces

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class MalformedUrlError(FetchError):
    outcome = "refused"


class UrlRefusedError(FetchError):
    """A rule forbids the URL or its address."""

    outcome = "refused"


class ContentTooLargeError(FetchError):
    """The content has more bytes than an item may have."""

    outcome = "too_large"


class ServerRefusedError(FetchError):
    """The server's answer will be the same next time."""


class ServerFailedError(FetchError):
    """A retry may succeed; `retry_after_s` is the time that the server asked for."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class ServerStalledError(ServerFailedError):
    """The server was not connected, or sent nothing, for too long."""

    outcome = "timeout"


class FetchTimeoutError(FetchError):
    """The time for all attempts together is over."""

    outcome = "timeout"


class FetchBusyError(FetchError):
    """Too many other downloads ran until the time was over."""

    outcome = "busy"


class NoResourcesError(FetchError):
    """The machine lacks open files or memory."""

    outcome = "busy"


def request_error(error: FetchError, path: str, modality: Modality) -> RequestError:
    """Return the caller's error for the item whose URL stands at `path` of its request."""
    message = f"{path} cannot be fetched: {error.reason}"
    match error:
        case MalformedUrlError():
            return RequestError(400, f"invalid_{modality}_url", message, path)
        case UrlRefusedError():
            return RequestError(400, "url_not_allowed", message, path)
        case ContentTooLargeError():
            return RequestError(413, "media_too_large", message, path)
        case ServerStalledError() | FetchTimeoutError():
            return RequestError(400, "media_fetch_timeout", message, path)
        case FetchBusyError():
            return unavailable("fetch_busy", message, path)
        case NoResourcesError():
            return unavailable("no_resources", message, path)
        case _:
            return RequestError(400, "media_fetch_failed", message, path)
