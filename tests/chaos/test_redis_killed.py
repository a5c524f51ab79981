"""kill -9 of Redis at every step of the protocol; it comes back without its data."""

import pytest
from support.fast.scenario import TEXT, Action, Point, Scenario, points_of

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(None), ids=str)
async def test_requests_are_answered_or_told(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, None, Action.KILL)
    assert all(answer.is_right or answer.is_documented_error for answer in case.answers), case
    assert case.answers[TEXT].is_right, case
    assert max(case.tally.num_encodes.values()) <= 2, case.tally
    assert case.tally.beyond_takeovers == {}, case.tally
