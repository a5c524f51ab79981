"""Filters: leave candidates out while others remain.

`router` checks what an instance needs to serve a request at all.
"""

from dataclasses import dataclass
from typing import Literal

from triptych_gateway.routing.scheduling.candidates import Candidate, Filter

FilterName = Literal["suspect", "full"]


@dataclass(frozen=True, slots=True)
class SuspectFilter:
    """Leave out instances that could not be reached a moment ago."""

    def keeps(self, candidate: Candidate) -> bool:
        return not candidate.is_suspect


@dataclass(frozen=True, slots=True)
class FullFilter:
    """Leave out instances that announce a full KV cache."""

    full_above: float

    def keeps(self, candidate: Candidate) -> bool:
        return candidate.kv_usage is None or candidate.kv_usage < self.full_above


def make_filter(name: FilterName, full_above: float) -> Filter:
    """Return the filter called `name`."""
    return SuspectFilter() if name == "suspect" else FullFilter(full_above)
