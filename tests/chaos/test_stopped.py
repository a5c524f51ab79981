"""Each party stands still at every step of the protocol, and goes on: late answers, no others."""

import pytest

from tests.support.fast.case import judge
from tests.support.fast.scenario import Action, Point, Scenario, points_of
from tests.support.protocol_steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

MOST_JOBS: dict[Party | None, int | None] = {
    Party.ENCODER: None,  # another one takes over
    Party.CACHE_STORE: None,
    Party.PREFILL_DECODE: 1,
    Party.GATEWAY: 1,
    None: None,
}
"""Jobs in which an encode of one item was begun, where it may be no other number."""


@pytest.mark.parametrize(
    ("victim", "point"), [(victim, point) for victim in MOST_JOBS for point in points_of(victim)], ids=str
)
async def test_stopped(scenario: Scenario, victim: Party | None, point: Point) -> None:
    judge(await scenario.run(point, victim, Action.STOP), most_jobs=MOST_JOBS[victim])
