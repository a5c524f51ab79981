"""Choice of a link's transport: the best that both agents have and that has not just failed. Pure.

A link that fails counts against its transport for `AVOID_S`, for that agent in that incarnation. The cause
(network, peer or transport) does not matter: a restarted agent begins with the best transport again.
"""

from collections.abc import Sequence

from triptych_common.protocol.messages import FabricTransport, InstanceRecord

AVOID_S = 60.0
Life = tuple[str, int]
"""Incarnation of a target's agent: its boot id, and its store's generation."""


def life_of(agent: InstanceRecord) -> Life:
    return agent.boot_id, 0 if agent.fabric is None else agent.fabric.generation


class TransportChoice:
    """Failures by target, for one event loop; `now` is in monotonic seconds."""

    def __init__(self, transports: Sequence[FabricTransport]) -> None:
        """`transports` are ordered best first."""
        self.best = transports[0]
        self._rank = {each: rank for rank, each in enumerate(transports)}
        self._failed_at: dict[str, tuple[Life, dict[FabricTransport, float]]] = {}  # by target

    def choose(self, target: str, agent: InstanceRecord, now: float) -> FabricTransport | None:
        """Best transport that has not just failed, else the one that failed first; None if none is common."""
        avoided = self._avoided(target, agent, now)
        # `min` takes the first of equals.
        return min(self._common(agent), key=lambda each: avoided.get(each, float("-inf")), default=None)

    def num_left(self, target: str, agent: InstanceRecord, now: float) -> int:
        """Number of common transports that have not just failed."""
        avoided = self._avoided(target, agent, now)
        return sum(each not in avoided for each in self._common(agent))

    def on_failed(self, target: str, life: Life, transport: FabricTransport, now: float) -> None:
        """Record that a link by `transport` to this incarnation failed."""
        known_life, failed_at = self._failed_at.get(target, (None, {}))
        if known_life == life:
            failed_at[transport] = now

    def is_better(self, transport: FabricTransport, other: FabricTransport) -> bool:
        return self._rank[transport] < self._rank[other]

    def forget(self, target: str) -> None:
        """Forget a target that is no longer registered."""
        self._failed_at.pop(target, None)

    def _common(self, agent: InstanceRecord) -> list[FabricTransport]:
        theirs = () if agent.fabric is None else agent.fabric.transports
        return [each for each in self._rank if each in theirs]

    def _avoided(self, target: str, agent: InstanceRecord, now: float) -> dict[FabricTransport, float]:
        """Transports that just failed with this incarnation of the agent, with the time of each failure."""
        life = life_of(agent)
        known_life, failed_at = self._failed_at.get(target, (None, {}))
        if known_life != life:
            failed_at = {}
            self._failed_at[target] = life, failed_at
        return {transport: at for transport, at in failed_at.items() if now - at < AVOID_S}
