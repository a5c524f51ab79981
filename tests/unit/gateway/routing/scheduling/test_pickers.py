"""Pickers: the best, by turns among equals; or by chance, in proportion."""

import random
from collections import Counter
from functools import partial

from tests.support.gateway.routing import candidate
from triptych_gateway.routing.scheduling.candidates import Picker, ScoredCandidate
from triptych_gateway.routing.scheduling.profiles import pick_at_random, pick_best


def scored(name: str, total: float, picked_at: int = 0) -> ScoredCandidate:
    return ScoredCandidate(candidate(name, picked_at=picked_at), {"queue": total})


def names_of(picker: Picker, *candidates: ScoredCandidate) -> Counter[str]:
    return Counter(picker(candidates).candidate.record.instance for _ in range(2000))


def test_sums_that_differ_by_rounding_are_equal() -> None:
    one = ScoredCandidate(candidate("a", picked_at=2), {"x": 0.1, "y": 0.2})
    other = ScoredCandidate(candidate("b", picked_at=1), {"x": 0.3})
    assert pick_best([one, other]) is other


def test_weighted_random() -> None:
    picker = partial(pick_at_random, source=random.Random(3))
    found = names_of(picker, scored("a", 3.0), scored("b", 1.0), scored("c", 0.0))
    assert 1400 < found["a"] < 1600
    assert found["c"] == 0
    alike = names_of(picker, scored("a", 0.0), scored("b", 0.0))
    assert 900 < alike["a"] < 1100
