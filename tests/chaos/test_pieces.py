"""Faults while items are in pieces: every answer is right, and nothing is left over."""

import pytest

from tests.support.fast.case import check, judge
from tests.support.fast.client import Client, Question
from tests.support.fast.layout import Layout
from tests.support.fast.processes.tensors import MAX_GRID, png
from tests.support.fast.scenario import CLIENT_LIMIT_S, Action, Point, Scenario, points_of
from tests.support.fast.system import FastSystem
from tests.support.protocol_steps import Party

NUM_PIECES = 4
LAYOUT = Layout(num_pieces=NUM_PIECES)
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.parametrize("system", [LAYOUT], indirect=True, scope="module"),
]


async def test_an_item_in_pieces_is_one_item_to_its_callers(system: FastSystem) -> None:
    before = system.store_stats().num_seals_total
    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        question = Question("what?", (png(1, MAX_GRID), png(2, MAX_GRID)))
        check([await client.ask(question), await client.ask(question)])
    assert system.store_stats().num_seals_total - before == 2 * NUM_PIECES
    system.wait_until_idle()


@pytest.mark.parametrize("point", points_of(Party.ENCODER), ids=str)
async def test_an_encoder_is_killed(scenario: Scenario, point: Point) -> None:
    judge(await scenario.run(point, Party.ENCODER, Action.KILL))


@pytest.mark.parametrize("point", points_of(Party.ENCODER)[::4], ids=str)
async def test_an_encoder_hangs(scenario: Scenario, point: Point) -> None:
    judge(await scenario.run(point, Party.ENCODER, Action.STOP))
