"""A prefill_decode that stands still at every step of the protocol, and goes on: late answers, no others."""

import pytest

from tests.support.fast.case import judge
from tests.support.fast.scenario import Action, Point, Scenario, points_of
from triptych_common.protocol.steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(Party.PREFILL_DECODE), ids=str)
async def test_its_requests_go_on_with_it(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, Party.PREFILL_DECODE, Action.STOP)
    judge(case, most_jobs=1)
