"""FabricView: registered stores, and the fabric agent beside each; LinkRates: how fast each link is."""

import time
from dataclasses import dataclass, field

from cachetools import LRUCache

from triptych_common.protocol.messages import FabricTransport, InstanceRecord, Role
from triptych_common.protocol.transfers import EntryPlace, TransferFailureKind
from triptych_gateway.decision.serving_costs import LinearCost
from triptych_gateway.routing.registry_view import RegistryView


@dataclass(frozen=True, slots=True)
class _Facts:
    records: tuple[InstanceRecord, ...] = ()
    stores: frozenset[str] = frozenset()
    store_of: dict[str, str] = field(default_factory=dict)  # by instance
    agents: dict[str, InstanceRecord] = field(default_factory=dict)  # by store

    @classmethod
    def of(cls, records: tuple[InstanceRecord, ...]) -> "_Facts":
        store_of = {each.instance: each.store for each in records if each.store is not None}
        agents = {
            each.store: each
            for each in records
            if each.role is Role.FABRIC and each.fabric is not None and each.store is not None
        }
        return cls(records, frozenset(store_of.values()), store_of, agents)


class FabricView:
    """Registry's stores and agents, as last read."""

    def __init__(self, view: RegistryView) -> None:
        self._view = view
        self._known = _Facts()

    @property
    def are_apart(self) -> bool:
        """True if several stores are registered."""
        return len(self._facts().stores) > 1

    def store_of(self, instance: str) -> str | None:
        """Return the instance's store; None if it is not registered or has none."""
        return self._facts().store_of.get(instance)

    def agent_of(self, store: str) -> InstanceRecord | None:
        """Return the agent beside `store`, unless it is about to end."""
        agent = self._facts().agents.get(store)
        return None if agent is None or agent.draining else agent

    def has_several_ways(self, source: str | None, target: str | None) -> bool:
        """Return whether the agents of both stores have several transports in common."""
        common = set(FabricTransport)
        for store in (source, target):
            agent = None if store is None else self.agent_of(store)
            common &= set() if agent is None or agent.fabric is None else set(agent.fabric.transports)
        return len(common) > 1

    def generation_of(self, store: str) -> int | None:
        """Return the store's generation, as its agent announces."""
        agent = self._facts().agents.get(store)
        return None if agent is None or agent.fabric is None else agent.fabric.generation

    def is_dead(self, place: EntryPlace) -> bool:
        """Return whether the store has been restarted since `place` was recorded."""
        return self.generation_of(place.store) != place.generation

    def _facts(self) -> _Facts:
        if self._known.records is not self._view.records:
            self._known = _Facts.of(self._view.records)
        return self._known


UNKNOWN_RATE = 1.25e6  # bytes a second, taken for a link without an estimate: 10 Mbit/s
AVOIDED_S = 10.0  # after a link has failed: what could not be reached may come back
MAX_LINKS = 4096

NOT_OF_THE_LINK = frozenset(
    {
        TransferFailureKind.ABSENT,
        TransferFailureKind.WRITER_LOST,
        TransferFailureKind.TARGET_FULL,
        TransferFailureKind.EXPIRED,
    }
)
"""Kinds of failures that are not the link's fault."""

Link = tuple[str, str]  # source, target


class LinkRates:
    """Rates of all links; `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._costs: LRUCache[Link, LinearCost] = LRUCache(MAX_LINKS)
        self._avoided_until: LRUCache[Link, float] = LRUCache(MAX_LINKS)

    def observe(self, link: Link, num_bytes: int, seconds: float, now: float) -> None:
        """Learn from a complete transfer; one of no bytes only shows that the link works."""
        self._avoided_until.pop(link, None)
        if num_bytes:
            cost = self._costs.get(link)
            if cost is None:
                cost = self._costs[link] = LinearCost()
            cost.observe(num_bytes, seconds, now)

    def seconds(self, link: Link, num_bytes: int, now: float) -> float:
        """Return the predicted seconds for `num_bytes`; a cautious guess without measurements."""
        cost = self._costs.get(link)
        line = None if cost is None else cost.line(now)
        return num_bytes / UNKNOWN_RATE if line is None else line.seconds(num_bytes)

    def measured_s(self, source: str, target: str, num_bytes: int) -> float | None:
        """Return `seconds` of a measured link, or None.

        A link that is avoided takes `AVOIDED_S` longer, also one without an estimate.
        """
        link, now = (source, target), time.monotonic()
        if self.is_avoided(link, now):
            return AVOIDED_S + self.seconds(link, num_bytes, now)
        return self.seconds(link, num_bytes, now) if self.is_measured(link, now) else None

    def is_measured(self, link: Link, now: float) -> bool:
        cost = self._costs.get(link)
        return cost is not None and cost.line(now) is not None

    def avoid(self, link: Link, now: float) -> None:
        """Avoid a link that has failed: others come first for a while."""
        self._avoided_until[link] = now + AVOIDED_S

    def is_avoided(self, link: Link, now: float) -> bool:
        return self._avoided_until.get(link, float("-inf")) > now
