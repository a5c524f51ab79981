"""kill -9 of a prefill_decode at every protocol step: another answers, or the stream ends with an error."""

import pytest

from tests.support.fast.case import is_right_or_broke_off, judge
from tests.support.fast.scenario import Action, Point, Scenario, points_of
from triptych_common.protocol.steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(Party.PREFILL_DECODE), ids=str)
async def test_another_one_answers(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, Party.PREFILL_DECODE, Action.KILL)
    judge(case, is_right_or_broke_off)
