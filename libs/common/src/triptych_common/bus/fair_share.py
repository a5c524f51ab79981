"""Which of several consumers of a group takes the next entry: one that holds fewer than the others. Pure.

A consumer that has work in hand and could take more must not take what others without work are about to
take. Redis serves consumers in the order in which they began to wait, whatever they hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupLoad:
    """What the consumers of one group hold, and what waits for them."""

    num_waiting: int  # entries that no consumer has
    num_held: Mapping[str, int]  # by consumer, for those that ever had an entry


def num_owed(load: GroupLoad, peers: frozenset[str], num_outstanding: int) -> int:
    """Entries that `peers` may take before each holds `num_outstanding`, as many as this consumer."""
    return sum(max(num_outstanding - load.num_held.get(name, 0), 0) for name in peers)


def must_let_go_first(load: GroupLoad, peers: frozenset[str], num_outstanding: int) -> bool:
    """Whether what waits is for others: it would only bring them up to what this consumer holds."""
    return 0 < load.num_waiting <= num_owed(load, peers, num_outstanding)
