"""What stands before an instance."""

import pytest

from triptych_gateway.decision.instance_load import InstanceLoad, WorkAhead


def test_due_work_is_done_one_after_the_other() -> None:
    load = InstanceLoad()
    first = load.begin_work("pd-0", 10.0, 2.0)
    load.begin_work("pd-0", 10.0, 3.0)
    assert load.work_ahead("pd-0", 10.0).busy_s() == 5.0
    assert load.work_ahead("pd-0", 11.0).busy_s() == 4.0
    assert load.work_ahead("pd-1", 11.0).busy_s() == 0.0
    load.end_work("pd-0", first, 11.5)  # sooner than predicted
    assert load.work_ahead("pd-0", 11.5).busy_s() == 3.0
    assert load.work_ahead("pd-0", 99.0).busy_s() == 0.0


def test_work_that_waits_for_encoders_stands_in_nobodys_way_until_it_is_due() -> None:
    ahead = WorkAhead(((0.0, 1.0), (5.0, 2.0)))
    assert ahead.busy_s() == 1.0
    assert ahead.busy_s(in_s=3.0) == 0.0
    assert ahead.busy_s(in_s=5.0) == 2.0
    assert ahead.num_due == 1


def test_the_delay_of_what_comes_later() -> None:
    ahead = WorkAhead(((0.0, 1.0), (2.0, 1.0), (2.5, 1.0)))
    assert ahead.delay_s(0.0) == 0.0
    assert ahead.delay_s(0.5) == 0.0  # done before anything is due
    assert ahead.delay_s(2.0) == pytest.approx(2.0)
    assert WorkAhead(((0.0, 1.0),)).delay_s(9.0) == 0.0


def test_streams_and_idleness() -> None:
    load = InstanceLoad()
    assert load.is_idle("pd-0")
    work = load.begin_work("pd-0", 0.0, 1.0)
    assert not load.is_idle("pd-0")
    load.end_work("pd-0", work, 1.0)
    load.begin_stream("pd-0")
    assert (load.num_streams("pd-0"), load.is_idle("pd-0")) == (1, False)
    load.end_stream("pd-0")
    assert load.is_idle("pd-0")


def test_instances_that_left_are_forgotten_when_nothing_runs_there() -> None:
    load = InstanceLoad()
    work = load.begin_work("pd-0", 0.0, 1.0)
    load.forget_all_but(set())
    assert load.work_ahead("pd-0", 0.0).busy_s() == 1.0
    load.end_work("pd-0", work, 1.0)
    load.forget_all_but(set())
    assert load.total_work_s("pd-0") == 0.0
    load.end_work("pd-0", work, 1.0)  # late, and harmless
