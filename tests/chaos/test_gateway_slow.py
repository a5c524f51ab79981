"""A gateway that gets little time, from every step of the protocol on: late answers, no others."""

import pytest

from tests.support.fast.case import judge
from tests.support.fast.scenario import Action, Point, Scenario, points_of
from triptych_common.protocol.steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(Party.GATEWAY), ids=str)
async def test_every_request_is_answered(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, Party.GATEWAY, Action.SLOW)
    judge(case, most_jobs=1)
