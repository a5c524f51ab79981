"""kill -9 of the gateway at every step of the protocol: callers lose their connection, nothing else is."""

import pytest
from support.fast.scenario import Action, Point, Scenario, points_of

from triptych_common.protocol.steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(Party.GATEWAY), ids=str)
async def test_its_callers_lose_their_connection(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, Party.GATEWAY, Action.KILL)
    assert all(answer.is_right or answer.is_gone for answer in case.answers), case
    assert case.bad_image.code == "invalid_image" or case.bad_image.is_gone, case
    assert max(case.tally.num_encodes.values()) <= 2, case.tally
    assert case.tally.beyond_takeovers == {}, case.tally
