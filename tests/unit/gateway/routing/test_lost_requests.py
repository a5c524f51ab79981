"""Digests of requests with which instances have ended."""

import pytest

from triptych_common.domain.errors import RequestError
from triptych_gateway.routing.instances import MAX_REQUESTS, MEMORY_S, LostRequests

OWNER, PATH = b"key", b"/v1/chat/completions"
BODY = b'{"messages":[]}'
A, B = ("pd-0", "a"), ("pd-1", "b")


def is_refused(lost: LostRequests, body: bytes = BODY, owner: bytes = OWNER) -> bool:
    try:
        lost.check(owner, PATH, body)
    except RequestError as error:
        return (error.status_code, error.code) == (502, "instance_lost")
    return False


def test_two_instances_must_have_ended() -> None:
    lost = LostRequests()
    lost.add([A], OWNER, PATH, BODY)
    lost.add([A], OWNER, PATH, BODY)  # of many requests that one instance had
    assert not is_refused(lost)
    lost.add([B], OWNER, PATH, BODY)
    assert is_refused(lost)


@pytest.mark.parametrize(
    ("owner", "body"), [(b"other", BODY), (OWNER, BODY + b" "), (OWNER, b"a" * (5 << 20))]
)
def test_other_keys_and_other_bodies_are_served(owner: bytes, body: bytes) -> None:
    lost = LostRequests()
    lost.add([A, B], OWNER, PATH, BODY)
    lost.add([A, B], OWNER, PATH, b"a" * (6 << 20))
    assert not is_refused(lost, body, owner)


def test_a_request_is_forgotten_when_it_was_answered_and_after_a_time() -> None:
    now = 0.0
    lost = LostRequests(lambda: now)
    lost.add([A, B], OWNER, PATH, BODY)
    lost.discard(OWNER, PATH, BODY)
    assert not is_refused(lost)
    lost.add([A, B], OWNER, PATH, BODY)
    now = MEMORY_S - 1
    assert is_refused(lost)
    now = MEMORY_S + 1
    assert not is_refused(lost)


def test_the_number_of_requests_is_bounded() -> None:
    lost = LostRequests()
    for number in range(MAX_REQUESTS + 1):
        lost.add([A, B], OWNER, PATH, b"%d" % number)
    assert not is_refused(lost, b"0")
    assert is_refused(lost, b"1")
