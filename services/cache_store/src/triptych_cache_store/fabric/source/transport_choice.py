"""By which transport a link goes: the best that both agents have, but for those that have just failed.

A link that did not come about, or was lost, counts against its transport: for `AVOID_S` the next one that
both have is taken, for that target's agent in that life. Whether the network, the peer or the transport
itself was to blame need not be known: an agent that begins another life begins with the best. Pure.
"""

from collections.abc import Sequence

from triptych_common.protocol.messages import FabricTransport, InstanceRecord

AVOID_S = 60.0
Life = tuple[str, int]
"""Of a target's agent: its boot id, and the generation of its store."""


def life_of(agent: InstanceRecord) -> Life:
    return agent.boot_id, 0 if agent.fabric is None else agent.fabric.generation


class TransportChoice:
    """For one event loop; `now` is a monotonic second."""

    def __init__(self, transports: Sequence[FabricTransport]) -> None:
        """`transports`: best first."""
        self.best = transports[0]
        self._rank = {each: rank for rank, each in enumerate(transports)}
        self._failed_at: dict[str, tuple[Life, dict[FabricTransport, float]]] = {}  # by target

    def choose(self, target: str, agent: InstanceRecord, now: float) -> FabricTransport | None:
        """The best that has not just failed; if all have, the one that failed first. None: none in common."""
        avoided = self._avoided(target, agent, now)
        # Of equals `min` takes the first.
        return min(self._common(agent), key=lambda each: avoided.get(each, float("-inf")), default=None)

    def num_left(self, target: str, agent: InstanceRecord, now: float) -> int:
        """How many that both have have not just failed."""
        avoided = self._avoided(target, agent, now)
        return sum(each not in avoided for each in self._common(agent))

    def on_failed(self, target: str, life: Life, transport: FabricTransport, now: float) -> None:
        """A link to the agent in that life did not come about by it, or was lost."""
        known_life, failed_at = self._failed_at.get(target, (None, {}))
        if known_life == life:
            failed_at[transport] = now

    def is_better(self, transport: FabricTransport, other: FabricTransport) -> bool:
        return self._rank[transport] < self._rank[other]

    def forget(self, target: str) -> None:
        """It is not registered any more."""
        self._failed_at.pop(target, None)

    def _common(self, agent: InstanceRecord) -> list[FabricTransport]:
        theirs = () if agent.fabric is None else agent.fabric.transports
        return [each for each in self._rank if each in theirs]

    def _avoided(self, target: str, agent: InstanceRecord, now: float) -> dict[FabricTransport, float]:
        """Those that have just failed with the agent in its present life, and when."""
        life = life_of(agent)
        known_life, failed_at = self._failed_at.get(target, (None, {}))
        if known_life != life:
            failed_at = {}
            self._failed_at[target] = life, failed_at
        return {transport: at for transport, at in failed_at.items() if now - at < AVOID_S}
