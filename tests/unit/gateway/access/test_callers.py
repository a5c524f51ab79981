"""Whether the page at `/ui` shows two callers the same."""

import pytest

from triptych_gateway.access.auth import Caller
from triptych_gateway.access.key_limits import KeyLimits

ALICE = Caller("alice", "red", limits=KeyLimits(models=("a", "b")))


@pytest.mark.parametrize(
    "other",
    [
        Caller("alice", "red", limits=KeyLimits(models=("a", "b"), requests_per_minute=3)),
        Caller("alice", "red", limits=KeyLimits(models=("b", "a"))),
    ],
)
def test_other_limits_show_the_same(other: Caller) -> None:
    assert other.sees_as(ALICE)


@pytest.mark.parametrize(
    "other",
    [
        Caller("anna", "red", limits=ALICE.limits),
        Caller("alice", "blue", limits=ALICE.limits),
        Caller("alice", "red", limits=ALICE.limits, is_operator=True),
        Caller("alice", "red", limits=KeyLimits(models=("a",))),
        Caller("alice", "red", limits=KeyLimits()),
        Caller("alice", "red"),
    ],
)
def test_other_rights_show_something_else(other: Caller) -> None:
    assert not other.sees_as(ALICE)
    assert not ALICE.sees_as(other)
