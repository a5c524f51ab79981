"""Pickers: choose among the scored candidates."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from triptych_gateway.routing.scheduling.candidates import Picker, ScoredCandidate

PickerName = Literal["best", "weighted_random"]


@dataclass(frozen=True, slots=True)
class BestPicker:
    """Picker of the highest score, and among equal ones of the least recently chosen."""

    def pick(self, scored: Sequence[ScoredCandidate]) -> ScoredCandidate:
        return min(scored, key=lambda each: (-each.total, each.candidate.picked_at))


@dataclass(frozen=True, slots=True)
class WeightedRandomPicker:
    """Picker by chance, in proportion to the scores; if all are 0, with equal chances."""

    source: random.Random = field(default_factory=random.Random)

    def pick(self, scored: Sequence[ScoredCandidate]) -> ScoredCandidate:
        totals = [each.total for each in scored]
        return self.source.choices(scored, totals if any(totals) else None)[0]


def make_picker(name: PickerName) -> Picker:
    """Return the picker called `name`."""
    return BestPicker() if name == "best" else WeightedRandomPicker()
