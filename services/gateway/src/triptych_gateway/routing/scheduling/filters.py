"""Filters: which candidates are left out while others are there.

What an instance must have to serve a request at all is none of their business: `router` has that.
"""

from dataclasses import dataclass
from typing import Literal

from triptych_gateway.routing.scheduling.candidates import Candidate, Filter

FilterName = Literal["suspect", "full"]


@dataclass(frozen=True, slots=True)
class SuspectFilter:
    """Not those that could not be reached a moment ago."""

    def keeps(self, candidate: Candidate) -> bool:
        return not candidate.is_suspect


@dataclass(frozen=True, slots=True)
class FullFilter:
    """Not those whose KV cache is used up, as far as they say."""

    full_above: float

    def keeps(self, candidate: Candidate) -> bool:
        return candidate.kv_usage is None or candidate.kv_usage < self.full_above


def make_filter(name: FilterName, full_above: float) -> Filter:
    """The filter of this name."""
    return SuspectFilter() if name == "suspect" else FullFilter(full_above)
