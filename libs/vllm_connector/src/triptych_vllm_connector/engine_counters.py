"""Counts of prefill_decode's engine for its host's `/metrics`; `connector` carries them there. Pure.

EngineCore counts on its own thread. vLLM carries the changes since the last step to the host with each step's
output (`get_ec_connector_stats`): without a lock, a call or a wait, and nothing if nothing changed. Events
between steps go with the next one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych_common.telemetry.metrics import LATENCY_BUCKETS_S, MetricFacts, MetricKind

MAX_TIMES = 10_000  # observations of a step; samples beyond this are dropped until the next report


@dataclass(frozen=True)
class EngineMetric:
    """One metric; vLLM's labels `model_name` and `engine` precede its own."""

    name: str  # without `triptych_`, and without a counter's `_total`
    kind: MetricKind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = LATENCY_BUCKETS_S

    def facts(self, common: tuple[str, ...] = ("model_name", "engine")) -> MetricFacts:
        """Name, kind and labels as Prometheus scrapes them."""
        return MetricFacts.of(self.kind, self.name, (*common, *self.labels))


LOAD_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)

PARKED = EngineMetric("prefill_decode_parked_requests", "gauge", "Requests that wait outside vLLM's queues")
STALLED = EngineMetric(
    "prefill_decode_stalled_requests", "gauge", "Requests that wait for items and hold KV blocks"
)
STALLS = EngineMetric("prefill_decode_stalls", "counter", "Times that a running request was stalled")
WAIT_S = EngineMetric(
    "prefill_decode_wait_seconds", "histogram", "Seconds that a request was parked or stalled"
)
PREALLOCATIONS = EngineMetric(
    "prefill_decode_preallocations",
    "counter",
    "Items that asked for space, by decision: granted, or queued until others give space back",
    ("decision",),
)
PENDING = EngineMetric("prefill_decode_pending_requests", "gauge", "Requests queued for space")
BUDGET = EngineMetric("prefill_decode_budget_embeds", "gauge", "Rows that may be held for requests at once")
BUDGET_USED = EngineMetric("prefill_decode_budget_embeds_in_use", "gauge", "Rows held for requests now")
HANDOVER_BYTES = EngineMetric(
    "prefill_decode_handover_bytes", "counter", "Bytes of tensors that workers loaded", ("transport",)
)
HANDOVER_S = EngineMetric(
    "prefill_decode_handover_seconds",
    "histogram",
    "Seconds to load one tensor into vLLM's encoder cache, inside the step",
    ("transport",),
    LOAD_BUCKETS_S,
)
FAILED_LOADS = EngineMetric(
    "prefill_decode_failed_loads",
    "counter",
    "Tensors that a worker could not read, which fails their requests",
)
LOCAL_ENCODES = EngineMetric(
    "prefill_decode_local_encodes", "counter", "Requests whose media this instance encodes itself"
)

ENGINE_METRICS = (
    PARKED, STALLED, STALLS, WAIT_S, PREALLOCATIONS, PENDING, BUDGET, BUDGET_USED, HANDOVER_BYTES, HANDOVER_S,
    FAILED_LOADS, LOCAL_ENCODES,
)  # fmt: skip

Changes = dict[str, dict[str, Any]]
"""Changes by metric name, then by the value of its own label (or ""): a gauge's value, a counter's increase,
a histogram's observations. Plain types only, because vLLM sends it between processes."""


class EngineCounters:
    """Changes since the last `take`, by metric and label."""

    def __init__(self) -> None:
        self._changes: Changes = {}
        self._gauges: dict[str, float] = {}
        self._has_changed = False  # one of them
        self._totals: dict[tuple[str, str], int] = {}

    def count(self, metric: EngineMetric, number: float = 1, label: str = "") -> None:
        if number:
            values = self._changes.setdefault(metric.name, {})
            values[label] = values.get(label, 0) + number

    def count_up_to(self, metric: EngineMetric, total: int, label: str = "") -> None:
        key = (metric.name, label)
        self.count(metric, total - self._totals.get(key, 0), label)
        self._totals[key] = total

    def observe(self, metric: EngineMetric, value: float, label: str = "") -> None:
        times: list[float] = self._changes.setdefault(metric.name, {}).setdefault(label, [])
        if len(times) < MAX_TIMES:
            times.append(value)

    def set_gauge(self, metric: EngineMetric, value: float) -> None:
        if self._gauges.get(metric.name) != value:
            self._gauges[metric.name] = value
            self._has_changed = True

    def take(self) -> Changes:
        """Changes since the last call; empty if there are none, else with all gauges.

        All gauges are sent because a host that warms up its engine drops earlier changes.
        """
        changes, self._changes = self._changes, {}
        if changes or self._has_changed:
            changes |= {name: {"": value} for name, value in self._gauges.items()}
        self._has_changed = False
        return changes


def merge_changes(first: Mapping[str, Mapping[str, Any]], then: Mapping[str, Mapping[str, Any]]) -> Changes:
    kinds = {metric.name: metric.kind for metric in ENGINE_METRICS}
    merged: Changes = {name: dict(values) for name, values in first.items()}
    for name, values in then.items():
        known = merged.setdefault(name, {})
        for label, value in values.items():
            known[label] = value if kinds[name] == "gauge" or label not in known else known[label] + value
    return merged
