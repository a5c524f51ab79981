"""A Redis that stands still at every step of the protocol, and comes back with its data."""

import pytest
from support.fast.scenario import Action, Point, Scenario, points_of

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(None), ids=str)
async def test_everybody_waits_for_it(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, None, Action.STOP)
    assert all(answer.is_right for answer in case.answers), case
    assert case.bad_image.code == "invalid_image", case
    assert max(case.tally.num_encodes.values()) <= 2, case.tally
    assert case.tally.beyond_takeovers == {}, case.tally
