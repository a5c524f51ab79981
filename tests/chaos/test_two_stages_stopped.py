"""Requests that one instance prefills and another decodes: either stands still at each step, and goes on."""

import pytest

from tests.support.fast.case import judge
from tests.support.fast.layout import Layout
from tests.support.fast.scenario import Action, Point, Scenario, points_of
from tests.support.protocol_steps import STAGE_STEPS, Party

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.parametrize(
        "system", [Layout(num_prefill_decodes=0, num_prefills=2, num_decodes=2)], indirect=True
    ),
]


@pytest.mark.parametrize("point", points_of(Party.DECODE, STAGE_STEPS), ids=str)
async def test_decode_stopped(scenario: Scenario, point: Point) -> None:
    """For longer than the lease of a KV cache: it is made again."""
    judge(await scenario.run(point, Party.DECODE, Action.STOP))


@pytest.mark.parametrize("point", points_of(Party.PREFILL, STAGE_STEPS)[:2], ids=str)
async def test_prefill_stopped(scenario: Scenario, point: Point) -> None:
    judge(await scenario.run(point, Party.PREFILL, Action.STOP))
