"""An engine of vLLM's own schedulers and EngineCore's own loop; store, bus and worker are played."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.vllm_connector.parking_engine import SCHEDULERS, ParkingEngine


@pytest.fixture(params=SCHEDULERS, ids=["one step", "two steps in flight"])
def make(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ParkingEngine]]:
    """Engines, of which nothing wrong is left in the end."""
    made: list[ParkingEngine] = []

    def make(**options: Any) -> ParkingEngine:
        defaults = {"budget": 100, "overlap": True, "overlap_min_tokens": 1}
        made.append(ParkingEngine(monkeypatch, *request.param, **{**defaults, **options}))
        return made[-1]

    yield make
    for each in made:
        each.check_idle()


@pytest.fixture
def engine(make: Callable[..., ParkingEngine]) -> ParkingEngine:
    return make()
