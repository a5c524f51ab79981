"""What an engine counts between two steps, and how reports of it are put together."""

import pytest

from triptych_vllm_connector.engine_counters import (
    ENGINE_METRICS,
    HANDOVER_BYTES,
    HANDOVER_S,
    MAX_TIMES,
    PARKED,
    PREALLOCATIONS,
    STALLED,
    STALLS,
    WAIT_S,
    EngineCounters,
    merge_changes,
)


def test_nothing_is_reported_where_nothing_has_changed() -> None:
    tally = EngineCounters()
    assert tally.take() == {}
    tally.set_gauge(PARKED, 0)
    assert tally.take() == {PARKED.name: {"": 0}}
    tally.set_gauge(PARKED, 0)
    tally.count(STALLS, 0)
    tally.count_up_to(PREALLOCATIONS, 0, "granted")
    assert tally.take() == {}


def test_what_has_changed_is_reported_once_and_gauges_with_every_report() -> None:
    tally = EngineCounters()
    tally.set_gauge(PARKED, 2)
    tally.set_gauge(STALLED, 1)
    tally.take()  # perhaps it did not come through
    tally.count(HANDOVER_BYTES, 5, "pinned_shm")
    tally.count(HANDOVER_BYTES, 7, "pinned_shm")
    tally.observe(HANDOVER_S, 0.5, "pinned_shm")
    tally.count_up_to(PREALLOCATIONS, 3, "granted")
    assert tally.take() == {
        HANDOVER_BYTES.name: {"pinned_shm": 12},
        HANDOVER_S.name: {"pinned_shm": [0.5]},
        PREALLOCATIONS.name: {"granted": 3},
        PARKED.name: {"": 2},
        STALLED.name: {"": 1},
    }
    tally.count_up_to(PREALLOCATIONS, 5, "granted")
    assert tally.take()[PREALLOCATIONS.name] == {"granted": 2}


def test_observations_are_bounded_where_no_report_is_taken() -> None:
    tally = EngineCounters()
    for _ in range(MAX_TIMES + 5):
        tally.observe(WAIT_S, 1.0)
    assert len(tally.take()[WAIT_S.name][""]) == MAX_TIMES


def test_two_reports_become_one() -> None:
    first = {STALLS.name: {"": 1}, WAIT_S.name: {"": [1.0]}, PARKED.name: {"": 4}}
    then = {STALLS.name: {"": 2}, WAIT_S.name: {"": [2.0]}, PARKED.name: {"": 3}, STALLED.name: {"": 1}}
    merged = merge_changes(first, then)
    assert merged == {
        STALLS.name: {"": 3},
        WAIT_S.name: {"": [1.0, 2.0]},
        PARKED.name: {"": 3},
        STALLED.name: {"": 1},
    }
    assert first[WAIT_S.name] == {"": [1.0]}, "the first one is left as it was"


@pytest.mark.parametrize("metric", ENGINE_METRICS, ids=lambda metric: metric.name)
def test_a_metric_has_one_label_of_its_own_at_most(metric: object) -> None:
    assert len(getattr(metric, "labels", ())) <= 1, "reports have room for one"
