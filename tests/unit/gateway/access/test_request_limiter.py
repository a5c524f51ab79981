"""Bounds on requests and bytes: refused, never queued, and given back."""

import pytest

from triptych_common.domain.errors import RequestError
from triptych_gateway.access.request_limiter import RequestLimiter


def test_bytes_are_booked_as_they_come() -> None:
    limiter = RequestLimiter(max_requests=1, max_media_bytes=10)
    with limiter.hold_bytes() as first, limiter.hold_bytes() as second:
        first.resize(4)
        first.resize(8)
        second.resize(2)
        with pytest.raises(RequestError) as caught:
            second.resize(3)
        assert (caught.value.status_code, caught.value.code) == (429, "too_much_media")
        assert limiter.media_bytes == 10
        first.resize(5)
        second.resize(5)
    assert limiter.media_bytes == 0


def test_what_is_alone_may_be_as_large_as_a_body_may_be() -> None:
    limiter = RequestLimiter(max_requests=1, max_media_bytes=10)
    with limiter.hold_bytes() as first, limiter.hold_bytes() as second:
        first.resize(20)
        with pytest.raises(RequestError):
            second.resize(1)
        first.resize(15)  # less than before, and still above the bound
    assert limiter.media_bytes == 0


def test_refused_requests_come_back_one_after_the_other_as_places_become_free() -> None:
    limiter = RequestLimiter(max_requests=4, max_media_bytes=10)
    limiter.num_requests += 1
    limiter.end_request(8.0)  # so a place is free every 2 s
    refused = [limiter.take_wait_s(100.0) for _ in range(6)]
    assert refused == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert limiter.take_wait_s(200.0) == 2.0
