"""Admission: how many requests, and how many bytes of media, the gateway holds at once. Pure counters."""

from collections.abc import Iterator
from contextlib import contextmanager

from triptych_common.domain.errors import RequestError


class Admission:
    """Bounded by design: what does not fit is refused with 429, never queued."""

    def __init__(self, max_requests: int, max_media_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_media_bytes = max_media_bytes
        self.num_requests = 0
        self.media_bytes = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Hold one place for a request.

        Raises:
            RequestError: 429, every place is taken.
        """
        if self.num_requests >= self._max_requests:
            raise RequestError(
                429, "too_many_requests", "too many requests in flight; try again shortly", None
            )
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    @contextmanager
    def media(self, num_bytes: int) -> Iterator[None]:
        """Hold room for one request's body and media.

        Raises:
            RequestError: 429, the gateway holds as many bytes as it may.
        """
        if self.media_bytes and self.media_bytes + num_bytes > self._max_media_bytes:
            raise RequestError(429, "too_much_media", "too much media in flight; try again shortly", None)
        self.media_bytes += num_bytes
        try:
            yield
        finally:
            self.media_bytes -= num_bytes
