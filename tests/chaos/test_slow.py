"""Each party gets little time, from every step of the protocol on: late answers, no others."""

import pytest

from tests.support.fast.case import judge
from tests.support.fast.scenario import Action, Point, Scenario, points_of
from tests.support.protocol_steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

MOST_JOBS: dict[Party | None, int | None] = {
    Party.ENCODER: None,
    Party.CACHE_STORE: 1,
    Party.PREFILL_DECODE: 1,
    Party.GATEWAY: 1,
    None: None,
}
"""Jobs in which an encode of one item was begun, where it may be no other number."""


@pytest.mark.parametrize(
    ("victim", "point"), [(victim, point) for victim in MOST_JOBS for point in points_of(victim)], ids=str
)
async def test_slow(scenario: Scenario, victim: Party | None, point: Point) -> None:
    judge(await scenario.run(point, victim, Action.SLOW), most_jobs=MOST_JOBS[victim])
