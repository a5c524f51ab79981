"""Until when a KV cache of another engine may be read."""

import pytest

from triptych_vllm_connector.worker.kv.leases import MARGIN_S, KvLeases

ONE, OTHER = ("engine", "one"), ("engine", "other")
EXTENSION_S = 20.0


def end_after(*heartbeats: float) -> float:
    leases = KvLeases(EXTENSION_S)
    for sent_at in heartbeats:
        leases.on_heartbeats([ONE], sent_at)
    return leases.end_of(ONE, 30.0)


@pytest.mark.parametrize(
    ("heartbeats", "end"),
    [
        ((), 30.0),
        ((5.0,), 30.0),
        ((15.0,), 35.0),
        ((15.0, 30.0), 50.0),
        ((30.0,), 30.0),
        ((15.0, 40.0, 45.0), 35.0),
    ],
    ids=["none", "early", "in_time", "again", "too_late", "one_too_late_counts_for_none_after_it"],
)
def test_heartbeats_in_time_lengthen_the_lease(heartbeats: tuple[float, ...], end: float) -> None:
    assert end_after(*heartbeats) == end - MARGIN_S


def test_each_has_heartbeats_of_its_own() -> None:
    leases = KvLeases(EXTENSION_S)
    leases.on_heartbeats([ONE, OTHER], 15.0)
    leases.on_heartbeats([OTHER], 30.0)
    assert leases.end_of(OTHER, 30.0) == 50.0 - MARGIN_S
    assert leases.end_of(ONE, 30.0) == 30.0 - MARGIN_S, "it waits no more, and is forgotten"


def test_a_lease_is_over_at_its_end_less_the_margin() -> None:
    leases = KvLeases(EXTENSION_S)
    assert not leases.is_over(ONE, 30.0, 30.0 - MARGIN_S - 0.01)
    assert leases.is_over(ONE, 30.0, 30.0 - MARGIN_S)
    assert not leases.is_over(ONE, None, 1e9), "its owner says of none"
