"""kill -9 of the cache_store at every step of the protocol: clients only wait longer."""

import pytest

from tests.support.fast.case import judge
from tests.support.fast.scenario import Action, Point, Scenario, points_of
from triptych_common.protocol.steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(Party.CACHE_STORE), ids=str)
async def test_sealed_tensors_and_leases_survive(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, Party.CACHE_STORE, Action.KILL)
    judge(case)
