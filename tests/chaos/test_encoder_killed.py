"""kill -9 of an encoder at every step of the protocol: clients only wait longer."""

import pytest

from tests.support.fast.case import judge
from tests.support.fast.scenario import Action, Point, Scenario, points_of
from triptych_common.protocol.steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(Party.ENCODER), ids=str)
async def test_another_encoder_takes_over(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, Party.ENCODER, Action.KILL)
    judge(case)
