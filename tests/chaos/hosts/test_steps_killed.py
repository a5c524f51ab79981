"""kill -9 and SIGSTOP of each end of a transfer, at every step between hosts."""

import pytest

from tests.support.fast.case import is_right_or_documented_error, judge
from tests.support.fast.processes.points import SENDING
from tests.support.fast.scenario import Action, Point, Scenario
from tests.support.hosts.fabric_points import fabric_points, is_always

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

AGENTS, STORES = ("fabric-a", "fabric-b"), ("store-a", "store-b")
POINTS = fabric_points()
MOST_JOBS = 4  # of one item: every attempt of the gateway may be the one that meets the fault
QUICK = {("bytes", SENDING, "fabric-a"), ("bytes", SENDING, "fabric-b"), ("stored", SENDING, "store-b")}
"""What every run tries; the rest takes minutes."""


def cases(victims: tuple[str, ...]) -> list[object]:
    return [
        pytest.param(
            point, victim, marks=() if (point.step.name, point.moment, victim) in QUICK else pytest.mark.long,
            id=f"{victim}-{point}",
        )
        for victim in victims
        for point in POINTS
    ]  # fmt: skip


@pytest.mark.parametrize(("point", "victim"), cases((*AGENTS, *STORES)))
async def test_killed(scenario: Scenario, point: Point, victim: str) -> None:
    case = await scenario.run(point, victim, Action.KILL, always=is_always(point))
    judge(case, is_right_or_documented_error, most_jobs=MOST_JOBS)


@pytest.mark.long
@pytest.mark.parametrize(("point", "victim"), cases(AGENTS))
async def test_stopped(scenario: Scenario, point: Point, victim: str) -> None:
    case = await scenario.run(point, victim, Action.STOP, always=is_always(point))
    judge(case, is_right_or_documented_error, most_jobs=MOST_JOBS)


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS, ids=str)
async def test_redis_killed(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, None, Action.KILL, always=is_always(point))
    judge(case, is_right_or_documented_error, most_jobs=MOST_JOBS)
