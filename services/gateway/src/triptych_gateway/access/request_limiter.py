"""How many requests, and how many bytes of media, the gateway holds at once. Pure counters."""

from collections.abc import Iterator
from contextlib import contextmanager

from triptych_common.domain.errors import RequestError


class RequestLimiter:
    """Bounded by design: what does not fit is refused with 429, never queued."""

    def __init__(self, max_requests: int, max_media_bytes: int) -> None:
        self._max_requests = max_requests
        self.max_media_bytes = max_media_bytes
        self.num_requests = 0
        self.media_bytes = 0

    @contextmanager
    def hold_request(self) -> Iterator[None]:
        """Hold one place for a request.

        Raises:
            RequestError: 429, every place is taken.
        """
        if self.num_requests >= self._max_requests:
            raise RequestError(429, "too_many_requests", "too many requests in flight; try again shortly")
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    @contextmanager
    def hold_bytes(self) -> Iterator["Booking"]:
        """Hold room for one request's body and media: none at first, see `Booking.resize`."""
        booking = Booking(self)
        try:
            yield booking
        finally:
            booking.resize(0)


class Booking:
    """The bytes that one request holds, booked as they come and given back as they go.

    Nothing is booked for bytes that are announced only: a client that sends nothing takes no room.
    """

    def __init__(self, limiter: RequestLimiter) -> None:
        self._limiter = limiter
        self.num_bytes = 0

    def resize(self, num_bytes: int) -> None:
        """From now on the request holds `num_bytes`. A request that is alone may hold any number.

        Raises:
            RequestError: 429, it is more than before, and the gateway holds as many bytes as it may.
        """
        limiter = self._limiter
        others = limiter.media_bytes - self.num_bytes
        if others and num_bytes > self.num_bytes and others + num_bytes > limiter.max_media_bytes:
            raise RequestError(429, "too_much_media", "too much media in flight; try again shortly", None)
        limiter.media_bytes = others + num_bytes
        self.num_bytes = num_bytes
