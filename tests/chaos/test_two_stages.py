"""Requests that one instance prefills and another decodes: a fault of either at each step; nothing stays."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from tests.support.fast.case import check, is_right_or_broke_off, judge
from tests.support.fast.client import Client, Question
from tests.support.fast.faults import Faults
from tests.support.fast.layout import Layout
from tests.support.fast.processes.points import RECEIVED, SENDING
from tests.support.fast.processes.tensors import png
from tests.support.fast.scenario import CLIENT_LIMIT_S, Action, Point, Scenario, points_of
from tests.support.fast.system import FastSystem
from tests.support.protocol_steps import STAGE_STEPS, Party, step

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.parametrize(
        "system", [Layout(num_prefill_decodes=0, num_prefills=2, num_decodes=2)], indirect=True
    ),
]

LIMIT_S = 8.0


@pytest.mark.parametrize("victim", [Party.PREFILL, Party.DECODE], ids=str)
@pytest.mark.parametrize("point", points_of(Party.PREFILL, STAGE_STEPS), ids=str)
async def test_killed(scenario: Scenario, point: Point, victim: Party) -> None:
    case = await scenario.run(point, victim, Action.KILL)
    judge(case, is_right_or_broke_off)


@pytest.mark.parametrize("name", ["prefill", "decode", "first_decoded"])
async def test_a_caller_leaves(system: FastSystem, faults: Faults, name: str) -> None:
    """In each stage; the one who has the request stands still meanwhile."""
    released = threading.Event()
    moment = SENDING if name == "first_decoded" else RECEIVED
    with faults.at(name, moment, lambda instance: released.wait(CLIENT_LIMIT_S) and None) as reached:
        async with Client(system.url(), CLIENT_LIMIT_S) as client:
            asking = asyncio.ensure_future(client.ask(Question(f"left in {name}", (png(300),))))
            await asyncio.to_thread(system.wait_until, _stands_at(system, name, moment), LIMIT_S, name)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        released.set()
        assert await asyncio.to_thread(reached.wait, LIMIT_S)
    await asyncio.to_thread(system.wait_until_idle)


def _stands_at(system: FastSystem, name: str, moment: str) -> Callable[[], bool]:
    """Whether a process has taken the armed point."""
    path = system.folder / f"{name}.{moment}"
    return lambda: not path.exists()


async def test_many_at_once_are_right_and_every_step_occurs(system: FastSystem) -> None:
    questions = [Question(f"soak {n}", tuple(png(400 + n % 7 + i) for i in range(n % 4))) for n in range(24)]
    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        left = [client.ask(Question(f"leaves {n}", (png(450 + n),)), 0.02 * n) for n in range(6)]
        answers = await asyncio.gather(*(client.ask(each) for each in questions), *left)
    check(answers[: len(questions)], more=system.log_ends())
    await asyncio.to_thread(system.wait_until_idle)
    seen = {point.split(".")[0] for point in system.seen_points()}
    assert {each.name for each in STAGE_STEPS} - seen <= {"abort_prefill", "abort_decode"}
    assert step("dispatch").name not in seen
