"""A primary of Redis Cluster is killed in the middle of requests: its replica takes its place in seconds."""

from collections.abc import Iterator

import pytest

from tests.support.fast.case import is_anything, is_right, is_right_or_documented_error, judge
from tests.support.fast.layout import Layout
from tests.support.fast.scenario import Action, Point, Scenario, points_of
from tests.support.fast.system import FastSystem
from tests.support.faults.redis_cluster import running_cluster

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.fixture(scope="module")
def system() -> Iterator[FastSystem]:
    with running_cluster() as cluster, FastSystem(cluster, Layout()) as running:
        yield running


@pytest.mark.parametrize("action", [Action.KILL, Action.STOP], ids=str)
@pytest.mark.parametrize("point", points_of(None)[::4], ids=str)
async def test_requests_are_answered_or_refused(scenario: Scenario, point: Point, action: Action) -> None:
    case = await scenario.run(point, None, action)
    judge(case, is_right_or_documented_error, text=is_right, bad_image=is_anything)
