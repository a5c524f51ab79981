"""A gateway that stands still at every step of the protocol, and comes back: late answers, no others."""

import pytest
from support.fast.scenario import Action, Point, Scenario, points_of

from triptych_common.protocol.steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(Party.GATEWAY), ids=str)
async def test_everybody_waits_for_it(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, Party.GATEWAY, Action.STOP)
    assert all(answer.is_right for answer in case.answers), case
    assert case.bad_image.code == "invalid_image", case
    assert max(case.tally.num_jobs.values()) == 1, case.tally
    assert case.tally.beyond_takeovers == {}, case.tally
