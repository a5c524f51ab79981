"""A world of several stores, each with a fabric agent: their parties' steps, their faults, what must hold."""

import itertools
from collections import Counter
from typing import Any

from tests.support.message_samples import instance_record
from tests.support.protocol_steps import Channel
from tests.support.protocol_world.config import ERRORS, REDIS, TRANSFER_FAULTS, Config, Enabled, Key
from tests.support.protocol_world.encoder import EncoderActor, content_of
from tests.support.protocol_world.gateway import GatewayActor
from tests.support.protocol_world.network import DIGEST, Way, step_of
from tests.support.protocol_world.stages.world import StageWorld
from tests.support.protocol_world.store import StoreActor
from tests.support.protocol_world.transfers.agent import AgentActor
from tests.support.protocol_world.transfers.gateway import MAX_TRANSFERS, TransferGateway
from tests.support.protocol_world.transfers.wires import SWITCH, End, Frame, Hello, Refused, Socket
from tests.support.protocol_world.virtual_loop import CLOCK
from tests.support.protocol_world.world import World
from triptych_cache_store.entries.entry_table import EntryState
from triptych_common.protocol.messages import FabricEndpoint, InstanceRecord, Role
from triptych_common.protocol.transfers import TransferCompleted, TransferFailed, TransferOrder
from triptych_fabric.wire.frames import FrameKind

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


SPARE_S = 10.0  # the longest that a job is left to the encoders of its own stream
STEPS = {
    FrameKind.OFFER: "offer",
    FrameKind.ACCEPTED: "accept",
    FrameKind.CHUNK: "bytes",
    FrameKind.STORED: "stored",
}  # by kind of frame; others have the kind's name
LIMITED = frozenset(TRANSFER_FAULTS) - {"block_link"}
"""Each costs one attempt at most: every caller gets an answer, while some are left."""


def new_world(config: Config) -> World:
    if config.num_stores:
        return TransferWorld(config)
    return StageWorld(config) if config.num_decodes else World(config)


class TransferWorld(TransferFaults):
    """See the module docstring."""

    gateways: dict[str, Any]

    def __init__(self, config: Config) -> None:
        self.agents = {}
        self.blocked = {}
        self.num_orders: Counter[tuple[str, str, str]] = Counter()  # by gateway, item and target
        self._socket_numbers = itertools.count(1)
        super().__init__(config)
        SWITCH.call = self._call

    def _new_stores(self) -> dict[str, StoreActor]:
        config = self.config
        return {
            name: StoreActor(
                config.num_blocks,
                config.num_reserve_blocks,
                self.hashes,
                self.coverage,
                name=name,
                has_bytes=True,
            )
            for name in (f"store-{index}" for index in range(config.num_stores))
        }

    def _new_gateways(self) -> dict[str, GatewayActor]:
        self.agents = {
            name: AgentActor(name, self.network, store, self._endpoint_of, self.config.fabric_budget)
            for name, store in zip(
                (f"agent-{index}" for index in range(len(self.stores))), self.stores.values(), strict=True
            )
        }
        return {
            name: TransferGateway(
                name,
                self.network,
                lambda name: self.consumers[name].is_up,
                self.config.max_attempts,
                self._records,
            )
            for name in (f"gateway-{index}" for index in range(self.config.num_gateways))
        }

    def close(self) -> None:
        super().close()
        for agent in self.agents.values():
            agent.crash()

    # ---- parties ---------------------------------------------------------------------------------
    @property
    def engines(self) -> list[Any]:
        return [*super().engines, *self.agents.values()]

    def _engine(self, name: str) -> Any:
        return self.agents.get(name) or super()._engine(name)

    def _everybody(self) -> frozenset[str]:
        return super()._everybody() | self.agents.keys()

    def _moves(self, name: str) -> bool:
        if name in self.agents:
            return self.agents[name].is_up and not self.agents[name].is_frozen
        return super()._moves(name)

    def _records(self) -> list[InstanceRecord]:
        """The registry's."""
        found = [
            instance_record(
                each.name, Role.ENCODE, boot_id=each.name, namespace_digest=DIGEST, store=each.store.name
            )
            for each in self.encoders.values()
            if each.is_up
        ]
        found += [
            instance_record(
                each.name,
                Role.PREFILL_DECODE,
                boot_id=each.name,
                url=f"http://{each.name}",
                model="model",
                namespace_digest=DIGEST,
                store=each.store.name,
            )
            for each in self.consumers.values()
            if each.is_up
        ]
        return found + [each.record for each in self.agents.values() if each.is_up]

    def _endpoint_of(self, store: str) -> FabricEndpoint | None:
        return next(
            (each.record.fabric for each in self.agents.values() if each.is_up and each.store.name == store),
            None,
        )

    def _call(self, owner: str, endpoint: FabricEndpoint) -> Socket:
        """An agent calls another one: the kernel takes that call, if the process is there."""
        source = self.agents[owner]
        target = next(each for each in self.agents.values() if each.port == endpoint.port)
        if not target.is_up or self.blocked.get((source.name, target.name), 0.0) > CLOCK.now:
            raise OSError("not reached")
        number = next(self._socket_numbers)
        near, far = Socket(number, owner, is_source=True), Socket(number, target.name, is_source=False)
        near.peer, far.peer = far, near
        source.add_socket(near)
        target.add_socket(far)
        return near

    def enabled(self) -> list[Enabled]:
        """An agent calls others whenever it goes on: its steps are theirs, too."""
        return [
            each._replace(actors=each.actors | self.agents.keys())
            if each.actors & self.agents.keys()
            else each
            for each in super().enabled()
        ]

    def _coarse(self, each: Enabled) -> Enabled:
        """What stores do at once may reach anybody."""
        return each._replace(actors=self._everybody())

    # ---- steps -----------------------------------------------------------------------------------
    def _deliveries(self) -> list[Enabled]:
        found = super()._deliveries()
        found += [
            Enabled(Key("registry", name), frozenset({name}))
            for name, gateway in self.gateways.items()
            if gateway.is_up and gateway.is_outdated
        ]
        for name, agent in self.agents.items():
            if not self._moves(name):
                continue
            if agent.has_to_announce:
                found.append(Enabled(Key("announce", name), frozenset({name, *self.gateways})))
            found += [Enabled(Key("order_again", name, str(each)), frozenset({name})) for each in agent.again]
            for socket in agent.sockets:
                number = str(socket.number)
                both = frozenset({name, socket.peer.owner})
                if socket.inbox:
                    found.append(Enabled(Key("frame", name, number), both))
                if socket.connection is not None and socket.connection.can_send:
                    found.append(Enabled(Key("send", name, number), both))
                if socket.is_cut:
                    found.append(Enabled(Key("silence", name, number), frozenset({name})))
        return found

    def _work(self) -> list[Enabled]:
        return super()._work() + [
            Enabled(Key("job", encoder.name, str(each), "spare"), frozenset({encoder.name, REDIS}))
            for encoder in self.encoders.values()
            if self._moves(encoder.name) and not encoder.outstanding
            for each in self._spare_jobs(encoder)
        ]

    def _spare_jobs(self, idle: EncoderActor) -> list[int]:
        """The oldest of each other stream, if its own encoders do not take it."""
        found: dict[str, int] = {}
        for entry in self.network.jobs.values():
            if entry.stream == idle.stream or entry.owner is not None or entry.stream in found:
                continue
            near = [each for each in self.encoders.values() if each.stream == entry.stream]
            is_left = not any(self._moves(each.name) for each in near)
            if is_left or CLOCK.now - entry.published_at >= SPARE_S:
                found[entry.stream] = entry.number
        return list(found.values())

    def _deliver(self, way: Way, message: Any) -> None:
        if way[1] in self.agents:
            self.coverage[step_of(Channel.STREAM, way[0], way[1], message)] += 1
            self.agents[way[1]].receive(message)
            return
        if isinstance(message, TransferFailed):
            self.coverage[f"failed, {message.kind.value}"] += 1
        super()._deliver(way, message)

    def take(self, key: Key) -> None:
        before = self._published()
        super().take(key)
        for order in self._published():
            if order not in before:
                self._count(order)

    def _published(self) -> list[TransferOrder]:
        return [
            message
            for way, queue in self.network.queues.items()
            if way[2] == "transfers"
            for message in queue
        ]

    def _count(self, order: TransferOrder) -> None:
        assert order.gateway is not None
        assert order.source != order.target, "a transfer to where it is"
        self.num_orders[order.gateway, order.mm_hash, order.target] += 1

    def _do_registry(self, key: Key) -> None:
        self.gateways[key.subject].read_registry()

    def _do_announce(self, key: Key) -> None:
        self.agents[key.subject].announce()

    def _do_order_again(self, key: Key) -> None:
        self.agents[key.subject].take_again(int(key.what))

    def _do_frame(self, key: Key) -> None:
        agent = self.agents[key.subject]
        socket = agent.socket(int(key.what))
        match socket.inbox[0]:
            case Frame() as frame:
                self.coverage[STEPS.get(frame.kind, f"frame, {frame.kind.name.lower()}")] += 1
            case Hello() | Refused() | End() as other:
                self.coverage[f"link, {type(other).__name__.lower()}"] += 1
        agent.receive_frame(socket)

    def _do_send(self, key: Key) -> None:
        agent = self.agents[key.subject]
        agent.send_frame(agent.socket(int(key.what)))

    def _do_silence(self, key: Key) -> None:
        agent = self.agents[key.subject]
        agent.notice_silence(agent.socket(int(key.what)))

    def _do_reconnect(self, key: Key) -> None:
        super()._do_reconnect(key)
        agent = self.agents.get(key.subject.split("/")[0])
        if agent is not None and not agent.must_end:
            agent.loop.run(agent.on_reconnected)

    # ---- what must hold --------------------------------------------------------------------------
    def check(self) -> None:
        super().check()
        for store in self.stores.values():
            for entry in store.core.table.all_sealed():
                if entry.state in (EntryState.READY, EntryState.PINNED):
                    wanted = content_of(entry.mm_hash, self.rows[entry.mm_hash])
                    assert store.read(entry) == wanted, "the store has another tensor under this name"
        for agent in self.agents.values():
            in_hand = [reception for peer in agent.peers for reception in peer._receptions.values()]
            num_bytes = sum(each.offer.spec.num_bytes for each in in_hand if each._held is not None)
            fits = (
                num_bytes <= agent.budget._max_bytes or sum(each._held is not None for each in in_hand) == 1
            )
            assert fits, "more is reserved for other stores than may be"
        self._check_orders()

    def _check_orders(self) -> None:
        """Orders of one item for one target are bounded; a request that comes later begins anew.

        So does what was evicted, or lost with its store, or asked for again.
        """
        for (gateway, mm_hash, _), num in self.num_orders.items():
            requests = [each for each in self.requests.values() if each.gateway == gateway]
            num_needs = sum(mm_hash in each.hashes for each in requests)
            again = sum(store.num_evictions for store in self.stores.values()) + self.num_lost_entries
            again += sum(num for kind, num in self.faults.items() if kind not in TRANSFER_FAULTS)
            assert num <= MAX_TRANSFERS * (num_needs + again), "too many transfers of one item"

    def _pins_of(self, engine: Any) -> list[int]:
        if not isinstance(engine, AgentActor):
            return super()._pins_of(engine)
        if not engine.is_up:
            return []
        return self._under_way(engine) + [
            hold.pin_id for hold in engine.local._holds.values() if hold.pin_id is not None
        ]

    def check_quiet(self) -> None:
        super().check_quiet()
        for agent in self.agents.values():
            assert not agent.table._transfers, f"{agent.name} has a transfer"
            assert not agent.local._holds, f"{agent.name} holds an entry"
            assert not agent.budget.num_bytes, f"{agent.name} reserves for another store"
            assert not agent.budget._claims, f"{agent.name} lets an offer wait"
            assert not any(peer._receptions for peer in agent.peers), f"{agent.name} has an offer"
            assert not agent.loop.tasks, f"a task of {agent.name} never ends"
            assert not agent.unacked, f"{agent.name} does not finish an order"
        for gateway in self.gateways.values():
            assert not len(gateway.transfers.table), "the gateway waits for a transfer"
            assert not gateway.transfers._waits
            assert not gateway.transfers._targets
        if len(self.stores) == 1:
            assert not self.num_orders, "a transfer with one store"
            assert not self.network.places, "a directory with one store"

    @property
    def _errors(self) -> frozenset[str]:
        return ERRORS | {"transfer_failed"}

    def _are_all_of(self, kinds: frozenset[str]) -> bool:
        """While attempts are left nothing is lost but time."""
        return self.faults.total() < MAX_TRANSFERS and super()._are_all_of(kinds | LIMITED)

    @property
    def _is_prompt(self) -> bool:
        """After a failure the next attempt may be due a little later, and an agent's death is a timer's."""
        return not self.faults.total() and super()._is_prompt

    def _num_more_encodes(self, mm_hash: str) -> int:
        """What could not be brought is made again."""
        if not self.faults:
            return 0
        return sum(num for (_, each, _), num in self.num_orders.items() if each == mm_hash)
