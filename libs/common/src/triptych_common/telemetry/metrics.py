"""Prometheus metrics of one process, all named `triptych_*`.

A registry of our own: engines fill the default one with theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from triptych_common.telemetry.plain_histogram import PlainHistogram

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "triptych"

LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
NUMBER_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
BYTES_BUCKETS = tuple(float(1 << power) for power in range(12, 29, 2))  # 4 KiB to 256 MiB

MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class MetricFacts:
    """Name, kind and labels of one metric as scraped, for tests against documents."""

    name: str  # a counter's ends with `_total`
    kind: MetricKind
    labels: tuple[str, ...]

    @classmethod
    def of(cls, kind: MetricKind, name: str, labels: Sequence[str]) -> "MetricFacts":
        """Make the facts of `name`, given without the prefix as to `Metrics`."""
        suffix = "_total" if kind == "counter" else ""
        return cls(f"{PREFIX}_{name}{suffix}", kind, tuple(labels))


class Metrics:
    """Creates the metrics of one service and renders them for a scrape. Names get `triptych_` in front."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.facts: list[MetricFacts] = []

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        self.facts.append(MetricFacts.of("counter", name, labels))
        return Counter(name, text, labels, namespace=PREFIX, registry=self.registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        self.facts.append(MetricFacts.of("gauge", name, labels))
        return Gauge(name, text, labels, namespace=PREFIX, registry=self.registry)

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = LATENCY_BUCKETS_S
    ) -> Histogram:
        self.facts.append(MetricFacts.of("histogram", name, labels))
        return Histogram(name, text, labels, namespace=PREFIX, registry=self.registry, buckets=buckets)

    def plain_histogram(
        self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> PlainHistogram:
        """Make a histogram for frequent observations by one thread."""
        self.facts.append(MetricFacts.of("histogram", name, labels))
        return PlainHistogram(f"{PREFIX}_{name}", text, labels, buckets, self.registry)

    def render(self) -> bytes:
        """Return the text of a scrape, of type `CONTENT_TYPE`."""
        return generate_latest(self.registry)
