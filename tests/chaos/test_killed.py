"""kill -9 of each party at every step of the protocol; Redis comes back without its data."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.support.fast.case import (
    Case,
    is_anything,
    is_refused_or_gone,
    is_right,
    is_right_or_broke_off,
    is_right_or_documented_error,
    is_right_or_gone,
    judge,
)
from tests.support.fast.scenario import Action, Point, Scenario, points_of
from tests.support.protocol_steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

JUDGES: dict[Party | None, Callable[[Case], None]] = {
    Party.ENCODER: judge,  # another one takes over: clients only wait longer
    Party.CACHE_STORE: judge,  # sealed tensors and leases survive
    Party.PREFILL_DECODE: partial(judge, answers=is_right_or_broke_off),  # or another one answers
    Party.GATEWAY: partial(judge, answers=is_right_or_gone, bad_image=is_refused_or_gone),
    None: partial(judge, answers=is_right_or_documented_error, text=is_right, bad_image=is_anything),
}


@pytest.mark.parametrize(
    ("victim", "point"), [(victim, point) for victim in JUDGES for point in points_of(victim)], ids=str
)
async def test_killed(scenario: Scenario, victim: Party | None, point: Point) -> None:
    JUDGES[victim](await scenario.run(point, victim, Action.KILL))
