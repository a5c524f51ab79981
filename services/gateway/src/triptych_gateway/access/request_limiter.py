"""Bounds on the requests, and the bytes of media, that the gateway holds at once."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from triptych_common.domain.errors import RequestError

FADE = 0.95  # of the mean time of a request, with each that ends


class RequestLimiter:
    """Limiter that refuses excess requests with 429 and never queues them."""

    def __init__(self, max_requests: int, max_media_bytes: int) -> None:
        self._max_requests = max_requests
        self.max_media_bytes = max_media_bytes
        self.num_requests = 0
        self.media_bytes = 0
        self._request_s = 0.0  # mean time of recent requests
        self._free_at = 0.0  # monotonic seconds; when the place is free that is not promised yet

    @contextmanager
    def hold_request(self) -> Iterator[None]:
        """Hold one place for a request while the block runs.

        Raises:
            RequestError: 429, every place is taken.
        """
        if self.num_requests >= self._max_requests:
            message = "too many requests in flight; try again after Retry-After seconds"
            wait_s = self.take_wait_s(time.monotonic())
            raise RequestError(429, "too_many_requests", message, retry_after_s=wait_s)
        began_at = time.monotonic()
        self.num_requests += 1
        try:
            yield
        finally:
            self.end_request(time.monotonic() - began_at)

    def end_request(self, seconds: float) -> None:
        self.num_requests -= 1
        self._request_s = FADE * self._request_s + (1 - FADE) * seconds if self._request_s else seconds

    def take_wait_s(self, now: float) -> float:
        """Return the seconds until a place is free, by recent ends; a refused request takes the next one."""
        self._free_at = max(self._free_at, now) + self._request_s / self._max_requests
        self._free_at = min(self._free_at, now + self._request_s)  # by then all of today's have ended
        return self._free_at - now

    @contextmanager
    def hold_bytes(self) -> Iterator["Booking"]:
        """Hold room for body and media while the block runs, none at first (`Booking.resize`)."""
        booking = Booking(self)
        try:
            yield booking
        finally:
            booking.resize(0)


class Booking:
    """Bytes that one request holds, booked as they arrive and returned as they go.

    Nothing is booked for bytes that are announced only: a client that sends nothing takes no room.
    """

    def __init__(self, limiter: RequestLimiter) -> None:
        self._limiter = limiter
        self.num_bytes = 0

    def resize(self, num_bytes: int) -> None:
        """Set the bytes that the request holds from now on. A request that is alone may hold any number.

        Raises:
            RequestError: 429, it is more than before, and the gateway holds as many bytes as it may.
        """
        limiter = self._limiter
        others = limiter.media_bytes - self.num_bytes
        if others and num_bytes > self.num_bytes and others + num_bytes > limiter.max_media_bytes:
            message = "too much media in flight; try again after Retry-After seconds"
            wait_s = limiter.take_wait_s(time.monotonic())
            raise RequestError(429, "too_much_media", message, retry_after_s=wait_s)
        limiter.media_bytes = others + num_bytes
        self.num_bytes = num_bytes
