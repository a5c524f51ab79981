"""A cache_store that stands still at every step of the protocol: late answers, no others."""

import pytest

from tests.support.fast.case import judge
from tests.support.fast.scenario import Action, Point, Scenario, points_of
from triptych_common.protocol.steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(Party.CACHE_STORE), ids=str)
async def test_everybody_waits_for_it(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, Party.CACHE_STORE, Action.STOP)
    judge(case)
