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
        self._lives: dict[str, Life] = {}
        self._failed_at: dict[str, dict[FabricTransport, float]] = {}

    def choose(self, target: str, agent: InstanceRecord, now: float) -> FabricTransport | None:
        """The best that has not just failed; if all have, the one that failed first. None: none in common."""
        self._follow(target, agent)
        failed_at = self._failed_at[target]

        def tried_at(transport: FabricTransport) -> float:
            at = failed_at.get(transport)
            return float("-inf") if at is None or now - at >= AVOID_S else at

        return min(self._common(agent), key=tried_at, default=None)  # the first of equals

    def num_left(self, target: str, agent: InstanceRecord, now: float) -> int:
        """How many that both have have not just failed."""
        self._follow(target, agent)
        failed_at = self._failed_at[target]
        return sum(each not in failed_at or now - failed_at[each] >= AVOID_S for each in self._common(agent))

    def on_failed(self, target: str, life: Life, transport: FabricTransport, now: float) -> None:
        """A link to the agent in that life did not come about by it, or was lost."""
        if self._lives.get(target) == life:
            self._failed_at[target][transport] = now

    def is_better(self, transport: FabricTransport, other: FabricTransport) -> bool:
        return self._rank[transport] < self._rank[other]

    def forget(self, target: str) -> None:
        """It is not registered any more."""
        self._lives.pop(target, None)
        self._failed_at.pop(target, None)

    def _common(self, agent: InstanceRecord) -> list[FabricTransport]:
        theirs = () if agent.fabric is None else agent.fabric.transports
        return [each for each in self._rank if each in theirs]

    def _follow(self, target: str, agent: InstanceRecord) -> None:
        life = life_of(agent)
        if self._lives.get(target) != life:
            self._lives[target] = life
            self._failed_at[target] = {}
