"""What prefill_decode's engine counts, for its host's `/metrics`; `connector` takes it there. Pure.

EngineCore counts on its own thread. With the output of each step vLLM carries what has changed since the one
before to the host (`get_ec_connector_stats`): no lock, no call and no wait for it, and nothing at all where
nothing has changed. What happens while the engine has no step goes with the next one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych_common.telemetry.metrics import LATENCY_BUCKETS_S, MetricFacts, MetricKind

MAX_TIMES = 10_000  # kept until the next step; of more the rest is not told apart


@dataclass(frozen=True)
class EngineMetric:
    """One metric. vLLM's labels `model_name` and `engine` come in front of its own."""

    name: str  # without `triptych_`, and without a counter's `_total`
    kind: MetricKind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = LATENCY_BUCKETS_S

    def facts(self, common: tuple[str, ...] = ("model_name", "engine")) -> MetricFacts:
        """As it is scraped."""
        return MetricFacts.of(self.kind, self.name, (*common, *self.labels))


LOAD_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)

PARKED = EngineMetric("prefill_decode_parked_requests", "gauge", "Requests that wait for items, outside vLLM")
STALLED = EngineMetric(
    "prefill_decode_stalled_requests", "gauge", "Requests that wait for items and hold KV blocks"
)
STALLS = EngineMetric("prefill_decode_stalls", "counter", "Times that a running request was stalled")
WAIT_S = EngineMetric(
    "prefill_decode_wait_seconds", "histogram", "Parked or stalled, until it may run, or ends"
)
PREALLOCATIONS = EngineMetric(
    "prefill_decode_preallocations",
    "counter",
    "Items by what became of the question for space: granted, or queued until others give it back",
    ("decision",),
)
PENDING = EngineMetric("prefill_decode_pending_requests", "gauge", "Requests that queue up for space")
BUDGET = EngineMetric("prefill_decode_budget_embeds", "gauge", "Rows that may be held for requests at once")
BUDGET_USED = EngineMetric("prefill_decode_budget_embeds_in_use", "gauge", "Rows that are")
HANDOVER_BYTES = EngineMetric(
    "prefill_decode_handover_bytes", "counter", "Of tensors that workers loaded", ("transport",)
)
HANDOVER_S = EngineMetric(
    "prefill_decode_handover_seconds",
    "histogram",
    "One tensor's way into vLLM's encoder cache, inside the step",
    ("transport",),
    LOAD_BUCKETS_S,
)
FAILED_LOADS = EngineMetric(
    "prefill_decode_failed_loads", "counter", "Tensors that a worker could not read: their requests fail"
)
LOCAL_ENCODES = EngineMetric(
    "prefill_decode_local_encodes", "counter", "Requests whose media this instance encodes itself"
)

ENGINE_METRICS = (
    PARKED, STALLED, STALLS, WAIT_S, PREALLOCATIONS, PENDING, BUDGET, BUDGET_USED, HANDOVER_BYTES, HANDOVER_S,
    FAILED_LOADS, LOCAL_ENCODES,
)  # fmt: skip

Changes = dict[str, dict[str, Any]]
"""By the metric's name, then by the value of its own label, or "": a gauge's value, what a counter grew by,
a histogram's observations. As vLLM sends it between processes, so of plain types."""


class EngineTally:
    """What has changed since it was last taken."""

    def __init__(self) -> None:
        self._changes: Changes = {}
        self._gauges: dict[str, float] = {}
        self._has_changed = False  # one of them
        self._totals: dict[tuple[str, str], int] = {}

    def count(self, metric: EngineMetric, number: float = 1, label: str = "") -> None:
        """So many more."""
        if number:
            values = self._changes.setdefault(metric.name, {})
            values[label] = values.get(label, 0) + number

    def count_up_to(self, metric: EngineMetric, total: int, label: str = "") -> None:
        """Of what its owner counts: it is at `total` by now."""
        key = (metric.name, label)
        self.count(metric, total - self._totals.get(key, 0), label)
        self._totals[key] = total

    def observe(self, metric: EngineMetric, value: float, label: str = "") -> None:
        """One more of these."""
        times: list[float] = self._changes.setdefault(metric.name, {}).setdefault(label, [])
        if len(times) < MAX_TIMES:
            times.append(value)

    def set_gauge(self, metric: EngineMetric, value: float) -> None:
        """It is so now."""
        if self._gauges.get(metric.name) != value:
            self._gauges[metric.name] = value
            self._has_changed = True

    def take(self) -> Changes:
        """Empty: nothing has changed. Else with all gauges: what was taken before may not have come through,
        since a host that warms its engine up drops it."""
        changes, self._changes = self._changes, {}
        if changes or self._has_changed:
            changes |= {name: {"": value} for name, value in self._gauges.items()}
        self._has_changed = False
        return changes


def merge_changes(first: Mapping[str, Mapping[str, Any]], then: Mapping[str, Mapping[str, Any]]) -> Changes:
    """Both, one after the other."""
    kinds = {metric.name: metric.kind for metric in ENGINE_METRICS}
    merged: Changes = {name: dict(values) for name, values in first.items()}
    for name, values in then.items():
        known = merged.setdefault(name, {})
        for label, value in values.items():
            known[label] = value if kinds[name] == "gauge" or label not in known else known[label] + value
    return merged
