"""Load of the engine, for the instance's heartbeats.

The host counts its unfinished requests itself. vLLM reports how many of them the engine computes, and how
full its KV cache is, with each step, in its server's metrics.
"""

from itertools import count
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry

from triptych_common.protocol.messages import ServingLoad

RUNNING, KV_USAGE = "vllm:num_requests_running", "vllm:kv_cache_usage_perc"


class ServingLoadReader:
    """Reads the load from vLLM's engine client."""

    def __init__(self, engine: Any, metrics: CollectorRegistry = REGISTRY) -> None:
        self._engine = engine
        self._metrics = metrics
        self._beats = count(1)

    def read_fields(self) -> dict[str, ServingLoad]:
        """Load fields of the instance's record."""
        gauges = self._gauges()
        num_requests = self._engine.output_processor.get_num_unfinished_requests()
        num_running = min(num_requests, int(gauges.get(RUNNING, 0)))
        kv_usage = gauges.get(KV_USAGE)
        load = ServingLoad(
            num_beats=next(self._beats),
            num_running=num_running,
            num_waiting=num_requests - num_running,
            kv_usage=None if kv_usage is None else min(1.0, max(0.0, kv_usage)),
        )
        return {"load": load}

    def _gauges(self) -> dict[str, float]:
        """vLLM's gauges by name; empty if its statistics are off (`--disable-log-stats`)."""
        found = self._metrics.restricted_registry([RUNNING, KV_USAGE])
        return {sample.name: sample.value for family in found.collect() for sample in family.samples}


def kv_cache_tokens(vllm_config: Any) -> int | None:
    """Tokens that the engine's KV cache holds, as reported at its start."""
    cache = vllm_config.cache_config
    return (cache.num_gpu_blocks or 0) * cache.block_size or None
