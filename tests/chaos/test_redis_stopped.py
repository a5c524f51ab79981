"""A Redis that stands still at every step of the protocol, and comes back with its data."""

import pytest

from tests.support.fast.case import judge
from tests.support.fast.scenario import Action, Point, Scenario, points_of

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(None), ids=str)
async def test_everybody_waits_for_it(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, None, Action.STOP)
    judge(case)
