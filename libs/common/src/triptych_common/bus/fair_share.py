"""Fair share of entries: the consumer of a group that would finish an entry first takes it. Pure.

A consumer that could take more must not take what others are about to take and would finish sooner. Redis
serves consumers in the order in which they began to wait, whatever they hold and however fast they are. An
entry is done when all that its consumer holds is done: among equally fast consumers it goes to the one that
holds fewest, and a slow one takes an entry only if the fast ones hold enough more.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_RATIO = 1e6
ROUNDING = 1e-9


@dataclass(frozen=True)
class GroupLoad:
    """Number of entries that each consumer of one group holds, and that wait for them."""

    num_waiting: int  # entries that no consumer has
    num_held: Mapping[str, int]  # by consumer, for those that ever had an entry


@dataclass(frozen=True)
class Peer:
    """One consumer of the group, as it announces itself."""

    work_s: float | None = None  # above 0; that it takes for a unit of work; None: not known yet
    num_slots: int | None = None  # entries that it holds at most; None: not known


@dataclass(frozen=True)
class Consumers:
    """Living consumers of a group, with or without this one."""

    peers: Mapping[str, Peer] = field(default_factory=dict)

    def num_owed(self, load: GroupLoad, own_name: str, num_outstanding: int) -> int:
        """Return how many waiting entries the others would finish before this consumer its next one."""
        own, is_known = self.peers.get(own_name, Peer()), self._is_known
        others = [(name, peer) for name, peer in self.peers.items() if name != own_name]
        num = 0
        for name, peer in others:
            ratio = _ratio(own, peer) if is_known else 1.0
            num += _num_sooner(ratio, peer, load.num_held.get(name, 0), num_outstanding)
        return num

    @property
    def _is_known(self) -> bool:
        """True if the speed of each consumer is known; if not, all count as equally fast."""
        return all(peer.work_s is not None for peer in self.peers.values())

    def must_let_go_first(self, load: GroupLoad, own_name: str, num_outstanding: int) -> bool:
        """Return whether all waiting entries should be left to faster consumers."""
        return 0 < load.num_waiting <= self.num_owed(load, own_name, num_outstanding)


def _ratio(own: Peer, peer: Peer) -> float:
    return 1.0 if own.work_s is None or peer.work_s is None else min(own.work_s / peer.work_s, MAX_RATIO)


def _num_sooner(ratio: float, peer: Peer, num_held: int, num_outstanding: int) -> int:
    """Return how many entries `peer` finishes before a consumer of `num_outstanding` does its next."""
    num = math.ceil((num_outstanding + 1) * ratio - ROUNDING) - 1 - num_held
    if peer.num_slots is not None:
        num = min(num, peer.num_slots - num_held)
    return max(num, 0)
