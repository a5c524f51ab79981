"""Requests that one instance prefills and another decodes: Redis is killed, and returns without its data."""

import pytest

from tests.support.fast.case import is_anything, is_right, is_right_or_documented_error, judge
from tests.support.fast.layout import Layout
from tests.support.fast.scenario import Action, Point, Scenario, points_of
from tests.support.protocol_steps import STAGE_STEPS

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.parametrize(
        "system", [Layout(num_prefill_decodes=0, num_prefills=2, num_decodes=2)], indirect=True
    ),
]


@pytest.mark.parametrize("point", points_of(None, STAGE_STEPS), ids=str)
async def test_redis_killed(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, None, Action.KILL)
    judge(case, is_right_or_documented_error, text=is_right, bad_image=is_anything)
    assert not [each for each in case.answers if each.code == "no_instance"], str(case)
