"""When refused requests may come back."""

import pytest

from triptych_common.domain.fair_queue import FairKey
from triptych_common.protocol.ids import MmHash
from triptych_gateway.encode.encode_admission import MAX_RETRY_AFTER_S, ReturnTimes

DIGEST = "0" * 64
FLOOD, ONE = FairKey(flow="flood"), FairKey(flow="one")


def refuse(
    times: ReturnTimes, name: str, now: float = 0.0, fair_key: FairKey = FLOOD, excess_s: float = 1.0
) -> float:
    return times.refuse(DIGEST, fair_key, MmHash(name), excess_s, 0.5, now)


def test_each_refused_request_has_a_time_of_its_own() -> None:
    times = ReturnTimes()
    assert [refuse(times, each) for each in "abc"] == pytest.approx([1.0, 1.5, 2.0])
    assert refuse(times, "x", fair_key=ONE) == pytest.approx(1.0), "another flow's do not count"


def test_one_that_comes_back_early_keeps_its_time() -> None:
    times = ReturnTimes()
    for each in "abc":
        refuse(times, each)
    for _ in range(100):
        assert refuse(times, "b", 0.5) == pytest.approx(1.0)
    assert refuse(times, "d", 0.5) == pytest.approx(2.0), "its calls took nobody's place"


def test_one_that_is_refused_at_its_time_gets_another_behind_the_others() -> None:
    times = ReturnTimes()
    for each in "abc":
        refuse(times, each)
    assert times.is_due(DIGEST, FLOOD, MmHash("a"), 1.0)
    assert refuse(times, "a", 1.0, excess_s=0.1) == pytest.approx(1.5)


def test_a_time_is_due_once_it_has_come_and_until_it_is_let_in() -> None:
    times = ReturnTimes()
    assert not times.is_due(DIGEST, FLOOD, MmHash("a"), 9.0)
    refuse(times, "a", excess_s=5.0)
    assert not times.is_due(DIGEST, FLOOD, MmHash("a"), 2.0)
    assert times.is_due(DIGEST, FLOOD, MmHash("a"), 5.0)
    times.forget(DIGEST, FLOOD, MmHash("a"))
    assert not times.is_due(DIGEST, FLOOD, MmHash("a"), 5.0)


def test_no_time_is_too_far() -> None:
    assert refuse(ReturnTimes(), "a", excess_s=1e6) == MAX_RETRY_AFTER_S
