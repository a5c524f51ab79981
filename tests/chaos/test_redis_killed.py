"""kill -9 of Redis at every step of the protocol; it comes back without its data."""

import pytest

from tests.support.fast.case import is_anything, is_right, is_right_or_documented_error, judge
from tests.support.fast.scenario import Action, Point, Scenario, points_of

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(None), ids=str)
async def test_requests_are_answered_or_refused(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, None, Action.KILL)
    judge(case, is_right_or_documented_error, text=is_right, bad_image=is_anything)
