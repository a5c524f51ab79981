"""Prometheus metrics of one process, all named `triptych_*`.

A registry of our own: engines fill the default one with theirs.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "triptych"

LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
NUMBER_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
BYTES_BUCKETS = tuple(float(1 << power) for power in range(12, 29, 2))  # 4 KiB to 256 MiB

MetricKind = Literal["counter", "gauge", "histogram"]


class PlainSeries:
    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # up to each bound, and beyond them
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class PlainHistogram(Collector):
    """Histogram series by the values of their labels.

    It costs a sixth of what Prometheus' own client takes: cheap enough for every token. Used by one thread,
    so without locks: its series are lists of numbers, and become samples at a scrape.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], PlainSeries] = {}
        registry.register(self)

    def labels(self, *values: str) -> PlainSeries:
        """Return one series, made at its first use.

        Raises:
            ValueError: another number of values than labels.
        """
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name} has {len(self._labels)} labels")
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = PlainSeries(self._bounds)
        return series

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, series in self._series.items():
            total = 0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip(bounds, series.counts, strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric(values, buckets, series.sum)
        yield family


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
