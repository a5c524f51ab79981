"""An engine of vLLM's own schedulers and EngineCore's own loop; store, bus and worker are played."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.vllm_connector.parking_engine import SCHEDULERS, ParkingEngine


@pytest.fixture(params=SCHEDULERS, ids=["one step", "two steps in flight"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ParkingEngine]:
    def make(**options: Any) -> ParkingEngine:
        defaults = {"budget": 100, "overlap": True, "overlap_min_tokens": 1}
        return ParkingEngine(monkeypatch, *request.param, **{**defaults, **options})

    return make


@pytest.fixture
def engine(make: Callable[..., ParkingEngine]) -> ParkingEngine:
    return make()
