"""An encoder that stands still at every step of the protocol, and comes back: others take over."""

import pytest

from tests.support.fast.case import judge
from tests.support.fast.scenario import Action, Point, Scenario, points_of
from triptych_common.protocol.steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(Party.ENCODER), ids=str)
async def test_another_encoder_takes_over(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, Party.ENCODER, Action.STOP)
    judge(case)
