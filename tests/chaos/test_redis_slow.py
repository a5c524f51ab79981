"""A Redis that gets little time, from every step of the protocol on: late answers, no others."""

import pytest

from tests.support.fast.case import judge
from tests.support.fast.scenario import Action, Point, Scenario, points_of

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(None), ids=str)
async def test_every_request_is_answered(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, None, Action.SLOW)
    judge(case)
