"""FabricView: registered stores, and the fabric agent beside each."""

from dataclasses import dataclass, field

from triptych_common.protocol.messages import FabricTransport, InstanceRecord, Role
from triptych_common.protocol.transfers import EntryPlace
from triptych_gateway.routing.registry_view import RegistryView


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts from one read of the registry."""

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
