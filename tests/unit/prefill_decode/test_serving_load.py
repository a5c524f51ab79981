"""What an instance says of its load: its own count of requests, and vLLM's gauges."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from triptych_common.protocol.messages import ServingLoad
from triptych_prefill_decode.engine_health import KV_USAGE, RUNNING, ServingLoadReader, kv_cache_tokens


def engine_with(num_unfinished: int) -> Any:
    return SimpleNamespace(
        output_processor=SimpleNamespace(get_num_unfinished_requests=lambda: num_unfinished)
    )


def metrics_of(**values: float) -> CollectorRegistry:
    metrics = CollectorRegistry()
    for name, value in {"vllm:other": 9.0, **values}.items():
        Gauge(name, "", ["model_name", "engine"], registry=metrics).labels("m", "0").set(value)
    return metrics


@pytest.mark.parametrize(("unfinished", "running", "waiting"), [(5, 2, 3), (2, 2, 0), (1, 1, 0), (0, 0, 0)])
def test_requests_that_the_engine_does_not_compute_wait(unfinished: int, running: int, waiting: int) -> None:
    """vLLM's gauges are as of its last step: there may be fewer requests by now."""
    reader = ServingLoadReader(engine_with(unfinished), metrics_of(**{RUNNING: 2.0, KV_USAGE: 0.5}))
    expected = ServingLoad(num_beats=1, num_running=running, num_waiting=waiting, kv_usage=0.5)
    assert reader.read_fields() == {"load": expected}


def test_without_vllms_statistics_all_requests_wait_and_the_cache_is_not_known() -> None:
    load = ServingLoadReader(engine_with(3), metrics_of()).read_fields()["load"]
    assert (load.num_running, load.num_waiting, load.kv_usage) == (0, 3, None)


@pytest.mark.parametrize(("num_blocks", "tokens"), [(10, 1280), (0, None), (None, None)])
def test_what_its_cache_holds(num_blocks: int | None, tokens: int | None) -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=num_blocks, block_size=128))
    assert kv_cache_tokens(config) == tokens
