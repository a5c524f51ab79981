"""kill -9 of the gateway at every step of the protocol: callers lose their connection, nothing else is."""

import pytest

from tests.support.fast.case import is_refused_or_gone, is_right_or_gone, judge
from tests.support.fast.scenario import Action, Point, Scenario, points_of
from triptych_common.protocol.steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(Party.GATEWAY), ids=str)
async def test_its_callers_lose_their_connection(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, Party.GATEWAY, Action.KILL)
    judge(case, is_right_or_gone, bad_image=is_refused_or_gone)
