"""vLLM's counts of its prefix caches, over all engines."""

from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


@dataclass(frozen=True)
class PrefixCounts:
    """Tokens looked up in prefix caches, and those found."""

    num_queries: float = 0.0
    num_hits: float = 0.0

    def since(self, before: "PrefixCounts") -> "PrefixCounts":
        return PrefixCounts(self.num_queries - before.num_queries, self.num_hits - before.num_hits)

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_queries if self.num_queries else float("nan")


def counts_of(text: str) -> PrefixCounts:
    """Counts in one scrape of an engine."""
    found = {QUERIES: 0.0, HITS: 0.0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in found:
                found[sample.name] += sample.value
    return PrefixCounts(found[QUERIES], found[HITS])


def read_counts(urls: list[str]) -> PrefixCounts:
    """Sum of the counts of the engines at these addresses."""
    read = [counts_of(httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text) for url in urls]
    return PrefixCounts(sum(each.num_queries for each in read), sum(each.num_hits for each in read))
