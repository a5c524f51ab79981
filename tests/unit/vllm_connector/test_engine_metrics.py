"""prefill_decode's `/metrics`: vLLM's own endpoint, with our series among vLLM's. No engine is started.

vLLM's schedulers run in EngineCore's own loop, which carries the reports; its Prometheus logger and its route
take them, as in the host. The worker is played, and no model runs.
"""

import warnings
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY
from starlette.testclient import TestClient

from tests.support.scraping import Scrape
from tests.support.vllm_connector.fake_engine import mm_hash
from tests.support.vllm_connector.parking_engine import SCHEDULERS, ParkingEngine, vllm_config
from triptych_common.domain.transports import transport_of
from triptych_common.protocol.messages import Transport
from triptych_common.protocol.store import SHM
from triptych_vllm_connector.engine_counters import ENGINE_METRICS
from triptych_vllm_connector.step_orders import LoadedTensor

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from fastapi import FastAPI
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ECConnectorOutput

    from triptych_vllm_connector.step_metadata import LoadReport

A, B = mm_hash("a"), mm_hash("b")


def allowed() -> dict[str, list[str]]:
    """Values that labels may have."""
    return {
        "model_name": [str(vllm_config().model_config.served_model_name)],
        "engine": ["0"],
        "transport": [each.value for each in Transport],
        "decision": ["granted", "queued"],
    }


@pytest.fixture
def logger() -> Any:
    before = set(REGISTRY._collector_to_names)
    yield PrometheusStatLogger(vllm_config())
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def scrape(logger: PrometheusStatLogger) -> Scrape:
    """By vLLM's own route."""
    app = FastAPI()
    attach_router(app)
    answer = TestClient(app).get("/metrics")
    assert answer.status_code == 200
    return Scrape.of(answer.text)


class Reporting:
    """What a `ParkingEngine` reports goes to the logger, over the wire between the processes."""

    def __init__(self, engine: ParkingEngine, logger: PrometheusStatLogger) -> None:
        self._logger = logger
        make_stats = engine.scheduler.make_stats

        def reported(*args: Any, **kwargs: Any) -> Any:
            stats = make_stats(*args, **kwargs)
            packed = msgspec.msgpack.encode(stats.ec_connector_stats)
            self._logger.record(SchedulerStats(ec_connector_stats=msgspec.msgpack.decode(packed)), None)
            return stats

        engine.scheduler.make_stats = reported


@pytest.mark.parametrize(("scheduler_cls", "num_in_flight"), SCHEDULERS)
def test_our_series_are_scraped_with_vllms(
    monkeypatch: pytest.MonkeyPatch, logger: PrometheusStatLogger, scheduler_cls: Any, num_in_flight: int
) -> None:
    engine = ParkingEngine(monkeypatch, scheduler_cls, num_in_flight, budget=4)
    Reporting(engine, logger)
    load = engine.worker._load

    def loading(orders: list[Any]) -> frozenset[str]:
        lost = load(orders)
        if orders:
            transport = transport_of(SHM).value
            engine.consumer.on_loaded([LoadedTensor(transport, 64, 0.001) for _ in orders])
        return lost

    monkeypatch.setattr(engine.worker, "_load", loading)
    engine.add("r1", A)
    engine.add("r2", B)
    engine.run()
    waiting = scrape(logger)
    name = "triptych_prefill_decode_"
    assert waiting.total(f"{name}parked_requests") == 2
    assert waiting.total(f"{name}pending_requests") == 1  # no space for the second one
    assert waiting.total(f"{name}budget_embeds") == 4
    assert waiting.total(f"{name}budget_embeds_in_use") == 4
    assert waiting.total(f"{name}preallocations_total", decision="queued") == 1
    assert "vllm:num_requests_running" in waiting.names

    engine.comes(A)
    engine.run()
    engine.comes(B)
    engine.run()
    engine.check_idle()
    done = scrape(logger)
    assert done.total(f"{name}parked_requests") == 0
    assert done.total(f"{name}stalled_requests") == 0
    assert done.total(f"{name}pending_requests") == 0
    assert done.total(f"{name}budget_embeds_in_use") == 0
    assert done.total(f"{name}preallocations_total", decision="granted") == 2
    assert done.total(f"{name}wait_seconds_count") == 2
    assert done.total(f"{name}handover_bytes_total", transport="pinned_shm") == 128
    assert done.total(f"{name}handover_seconds_count", transport="pinned_shm") == 2
    assert done.unbounded(allowed()) == []
    families = {metric.name for metric in ENGINE_METRICS}
    assert {f"triptych_{each}" for each in families} <= done.names


def test_a_workers_report_comes_with_the_steps_output(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ParkingEngine(monkeypatch, *SCHEDULERS[0])
    seen: list[Any] = []
    monkeypatch.setattr(engine.consumer, "on_loaded", seen.append)
    update = engine.scheduler.update_from_output

    def with_report(scheduled: Any, output: Any) -> Any:
        if output.ec_connector_output is None and scheduled.total_num_scheduled_tokens:
            report = LoadReport(loaded=(LoadedTensor("redis", 1, 0.5),))
            output.ec_connector_output = ECConnectorOutput(ec_connector_worker_meta=report)
        return update(scheduled, output)

    monkeypatch.setattr(engine.scheduler, "update_from_output", with_report)
    engine.add("r1", A)
    engine.run()
    engine.comes(A)
    engine.run()
    assert (LoadedTensor("redis", 1, 0.5),) in seen
    assert engine.tokens["r1"], "a report without failures fails nothing"


def test_ranks_reports_become_one() -> None:
    one = LoadReport(frozenset({A}), (LoadedTensor("redis", 1, 0.5),))
    both = one.aggregate(LoadReport(frozenset({B}), (LoadedTensor("redis", 2, 0.1),)))
    assert both.failed == {A, B}
    assert [each.num_bytes for each in both.loaded] == [1, 2]
