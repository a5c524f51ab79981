"""The real fabric agent but for sockets, threads, Redis and the registry.

Real: `TransferTable`, `EntryPush`, `OutgoingLinks`, `OutgoingLink`, `EntryOutbox` at the sender;
`FabricPeer`, `Reception`, `ByteBudget`, `EntryInbox` at the receiver; `LocalStore` and `OrderReader` of
both. It is a client of its store as encoders are, with a mapping of the region.
"""

from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from tests.support.protocol_world.network import AsyncBusModel, Network
from tests.support.protocol_world.store import ClientSession, StoreActor
from tests.support.protocol_world.transfers.wires import PlayedConnection, Socket
from tests.support.protocol_world.virtual_loop import CLOCK, VirtualLoop
from triptych_common.protocol.messages import FabricEndpoint, FabricTransport, InstanceRecord, Role
from triptych_common.protocol.transfers import TransferOrder
from triptych_fabric.local_store import LocalStore
from triptych_fabric.metrics import FabricMetrics
from triptych_fabric.orders import OrderReader
from triptych_fabric.receiver.peer import FabricPeer, ReceiverParts
from triptych_fabric.receiver.reception import ByteBudget
from triptych_fabric.sender.links import OutgoingLinks
from triptych_fabric.sender.transfers import TransferTable
from triptych_fabric.transports.transport import RateLimit, Transport
from triptych_fabric.wire.handshake import Identity

METRICS = FabricMetrics()
PROGRESS_S = 5.0
FindEndpoint = Callable[[str], FabricEndpoint | None]


class AgentBus(AsyncBusModel):
    """`AsyncBus` of an agent: the world hands it the orders."""

    def consumer(self, stream: str, **options: Any) -> None:
        """Nothing is read with it."""


class Tasks:
    """`TaskGroup` of an agent. A task that fails ends the agent: here, the test."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def create_task(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.create_task(self._run(work))

    async def _run(self, work: Awaitable[Any]) -> None:
        try:
            await work
        except Exception as error:
            self._loop.errors.append(error)


class AgentActor:
    """One agent. Starts running; `crash` and `start` as often as one likes."""

    def __init__(
        self, name: str, network: Network, store: StoreActor, find_endpoint: FindEndpoint, max_bytes: int
    ) -> None:
        self.name = name
        self.store = store
        self.port = int(name.rsplit("-", 1)[1]) + 1
        self.num_lives = 0
        self.unacked: dict[int, TransferOrder] = {}  # of its stream: taken, and not done
        self._num_taken = 0
        self._network = network
        self._find_endpoint = find_endpoint
        self._max_bytes = max_bytes
        self.is_up = False
        self.start()

    def start(self) -> None:
        self.is_up, self.must_end, self.is_frozen = True, False, False
        self.num_lives += 1
        self.loop = VirtualLoop(self.name)
        self.sockets: list[Socket] = []
        self.again = list(self.unacked)  # what it finds in its stream
        self.local: LocalStore
        self.session = ClientSession(
            self.store,
            f"{self.name}/fabric",
            self.loop.create_future,
            lambda push: self.local.on_push(push),  # noqa: PLW0108 -- it is made next
            self._lost,
        )
        self.session.awaits_done = True
        mapping: Any = self.store.map_region()
        session: Any = self.session
        group: Any = Tasks(self.loop)
        self.local = LocalStore(session, mapping)
        self.identity = Identity(self.store.name, self.local.generation)
        self.announced = self.identity.generation
        self.budget = ByteBudget(self._max_bytes)
        self.peers: dict[FabricPeer, None] = {}
        credentials: Any = None
        transports = {FabricTransport.TCP: Transport()}
        self.links = OutgoingLinks(
            self.store.name, self._agent_of, transports, credentials, RateLimit(None), PROGRESS_S
        )
        self.parts = ReceiverParts(
            self.identity, credentials, self.local, self.budget, METRICS, group, transports, PROGRESS_S
        )
        self.bus: Any = AgentBus(self._network, self.name)
        self.reader = OrderReader(self.bus, self.name, group)  # type: ignore[arg-type]
        self.table = TransferTable(self.local, self.links, METRICS, group, self.reader.on_result)

    async def _agent_of(self, target: str) -> InstanceRecord | None:
        endpoint = self._find_endpoint(target)
        if endpoint is None:
            return None
        return InstanceRecord(instance=target, boot_id="b", role=Role.FABRIC, store=target, fabric=endpoint)

    def crash(self) -> None:
        self.is_up = False
        self.bus.network = None
        self.session.kill()
        for socket in self.sockets:
            socket.close()
            if socket.connection is not None:
                socket.connection.is_over = True
        self.sockets = []
        self.loop.kill()

    def _lost(self) -> None:
        """The session is over for good: the service ends."""
        self.must_end = True

    @property
    def sessions(self) -> tuple[ClientSession, ...]:
        return (self.session,)

    @property
    def has_to_announce(self) -> bool:
        """Its record names a life of the store that has ended."""
        return self.announced != self.identity.generation

    def announce(self) -> None:
        self.announced = self.identity.generation

    @property
    def record(self) -> InstanceRecord:
        return InstanceRecord(
            instance=self.name,
            boot_id=f"{self.name}/{self.num_lives}",
            role=Role.FABRIC,
            store=self.store.name,
            fabric=FabricEndpoint(host="10.0.0.1", port=self.port, generation=self.announced),
        )

    # ---- transitions -----------------------------------------------------------------------------
    def receive(self, order: TransferOrder) -> None:
        """Of its stream."""
        self._num_taken += 1
        self.unacked[self._num_taken] = order
        self.take_again(self._num_taken)

    def take_again(self, number: int) -> None:
        """Also one that it had before it died."""
        if number in self.again:
            self.again.remove(number)
        order = self.unacked.get(number)
        if order is None:  # Redis has lost it
            return
        envelope = SimpleNamespace(
            message=order,
            deadline=self._network.order_ends[order.transfer_id],
            received_at=CLOCK.now,
            traceparent=None,
        )
        unacked = self.unacked
        delivery: Any = SimpleNamespace(envelope=envelope, ack_soon=lambda: unacked.pop(number, None))
        self.loop.run(lambda: self.reader._on_delivery(delivery, self.table))

    def on_reconnected(self) -> None:
        """As `FabricAgent._follow_store`."""
        if self.local.generation != self.identity.generation:
            self.identity.generation = self.local.generation
            for peer in self.peers:
                peer.close()

    def add_socket(self, socket: Socket) -> None:
        """It has called somebody, or was called."""
        self.sockets.append(socket)

    def socket(self, number: int) -> Socket:
        return next(each for each in self.sockets if each.number == number)

    def receive_frame(self, socket: Socket) -> None:
        if socket.connection is None:
            self.loop.run(lambda: self._accept(socket))
        self._on_thread(socket, PlayedConnection.receive_next)

    def send_frame(self, socket: Socket) -> None:
        self._on_thread(socket, PlayedConnection.send_next)

    def notice_silence(self, socket: Socket) -> None:
        if socket.connection is None:
            self.sockets.remove(socket)
        else:
            self._on_thread(socket, PlayedConnection.notice_silence)

    def _accept(self, socket: Socket) -> None:
        channel: Any = socket
        peer = FabricPeer(self.parts, channel, self._on_peer_gone)
        self.peers[peer] = None

    def _on_peer_gone(self, peer: FabricPeer) -> None:
        del self.peers[peer]

    def _on_thread(self, socket: Socket, action: Callable[[PlayedConnection], None]) -> None:
        connection = socket.connection
        assert connection is not None
        self.loop.run(lambda: action(connection))
        if connection.is_over:
            self.sockets.remove(socket)

    def next_timer(self, *, with_upkeep: bool = True) -> float | None:
        return self.loop.next_timer(with_upkeep=with_upkeep) if self.is_up else None

    def run_due(self) -> None:
        if self.is_up:
            self.loop.run_due()
