"""Scrapes of Prometheus' text, parsed by its own client."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Scrape:
    """What one scrape has said."""

    families: tuple[Metric, ...]

    @classmethod
    def of(cls, text: str) -> "Scrape":
        return cls(tuple(text_string_to_metric_families(text)))

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels; 0: there is none."""
        return sum(
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    @property
    def names(self) -> set[str]:
        """Of families, as Prometheus has them: a counter's without `_total`."""
        return {family.name for family in self.families}

    def label_values(self) -> Iterator[tuple[str, str]]:
        """Yield every label of our samples and its value, without the bounds of buckets."""
        for family in self.families:
            if family.name.startswith("triptych_"):
                for sample in family.samples:
                    yield from ((key, value) for key, value in sample.labels.items() if key != "le")

    def unbounded(self, allowed: dict[str, Sequence[str]]) -> list[tuple[str, str]]:
        """Labels with values that are not of these lists."""
        found = set(self.label_values())
        return sorted((key, value) for key, value in found if value not in allowed.get(key, ()))


def scrape(port: int, host: str = "127.0.0.1") -> Scrape:
    """`GET /metrics`. Blocks."""
    with closing(HTTPConnection(host, port, timeout=10)) as connection:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, text
        assert response.headers["Content-Type"].startswith("text/plain"), response.headers
    return Scrape.of(text)
