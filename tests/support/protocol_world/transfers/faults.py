"""What may go wrong with agents, and between them."""

from tests.support.protocol_world.config import Enabled, Key
from tests.support.protocol_world.transfers.agent import AgentActor
from tests.support.protocol_world.transfers.wires import Frame
from tests.support.protocol_world.virtual_loop import CLOCK
from tests.support.protocol_world.world import World
from triptych_common.protocol.transfers import TransferCompleted, TransferFailed, TransferOrder

BLOCKED_S = 10.0  # of a link: longer than an agent tries to reach another one


class TransferFaults(World):
    """The part of `TransferWorld` that breaks things."""

    agents: dict[str, AgentActor]
    blocked: dict[tuple[str, str], float]  # (agent, agent): until when

    def _faults(self, is_busy: bool) -> list[Enabled]:
        found = super()._faults(is_busy)

        def add(kind: str, actors: set[str], subject: str, what: str = "", how: str = "") -> None:
            if kind in self.config.faults:
                found.append(Enabled(Key(kind, subject, what, how), frozenset(actors), is_fault=True))

        for name, agent in self.agents.items():
            if not agent.is_up:
                continue
            add("crash_agent", {*self.agents, *self.gateways}, name)
            if not agent.is_frozen:
                add("freeze_agent", {name}, name)
            for socket in agent.sockets:
                both = {name, socket.peer.owner}
                if socket.is_source and not socket.is_cut:
                    add("cut_link", both, name, str(socket.number))
                if socket.inbox and isinstance(first := socket.inbox[0], Frame) and first.chunk:
                    add("damage", both, name, str(socket.number))
            for other in self.agents:
                if other != name and self.blocked.get((name, other), 0.0) <= CLOCK.now:
                    add("block_link", {name, other}, name, other)
        for way in sorted(self.network.queues):
            if isinstance(self.network.peek(way), TransferOrder | TransferCompleted | TransferFailed):
                add("lose_transfer", {way[1]}, *way)
        return found

    def _do_crash_agent(self, key: Key) -> None:
        self.agents[key.subject].crash()

    def _do_freeze_agent(self, key: Key) -> None:
        """It stands still; its kernel keeps its connections, and takes what comes."""
        self.agents[key.subject].is_frozen = True

    def _do_thaw(self, key: Key) -> None:
        if key.subject in self.agents:
            self.agents[key.subject].is_frozen = False
        else:
            super()._do_thaw(key)

    def _do_cut_link(self, key: Key) -> None:
        """A connection carries nothing any more, and nobody is told; another one would."""
        self.agents[key.subject].socket(int(key.what)).cut()

    def _do_block_link(self, key: Key) -> None:
        """Nor would another one, for a while."""
        self.blocked[key.subject, key.what] = CLOCK.now + BLOCKED_S
        for socket in self.agents[key.subject].sockets:
            if socket.is_source and socket.peer.owner == key.what:
                socket.cut()

    def _do_lose_transfer(self, key: Key) -> None:
        """An order, or what came of it."""
        self._do_lose_message(key)

    def _do_damage(self, key: Key) -> None:
        """A byte of a chunk is another one when it comes."""
        inbox = self.agents[key.subject].socket(int(key.what)).inbox
        frame = inbox[0]
        assert isinstance(frame, Frame)
        inbox[0] = frame._replace(chunk=bytes([frame.chunk[0] ^ 0xFF]) + frame.chunk[1:])

    def _do_lose_redis(self, key: Key) -> None:
        super()._do_lose_redis(key)
        for agent in self.agents.values():
            agent.unacked.clear()
            agent.again.clear()
