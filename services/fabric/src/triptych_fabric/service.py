"""Assembles the fabric agent, runs it and ends it.

    connected -> listening -> registered -> orders are taken --stop--> draining -> deregistered -> closed

A draining agent is announced as such and accepts no new orders and offers; running transfers have
`drain_timeout_s` to finish.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from triptych_common import release
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registration, Registry
from triptych_common.domain.errors import BusUnavailableError, StoreUnavailableError, TriptychError
from triptych_common.protocol.messages import FabricEndpoint, FabricTransport, InstanceRecord, Role
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_common.runtime import StopSignal
from triptych_common.runtime.scrape_server import ScrapeServer
from triptych_common.runtime.service import first_failure
from triptych_common.telemetry import setup_service_tracing
from triptych_common.telemetry.logs import get_logger
from triptych_fabric.load import AgentLoad
from triptych_fabric.local_store import LocalStore
from triptych_fabric.metrics import FabricMetrics
from triptych_fabric.orders import OrderReader
from triptych_fabric.receiver.listener import FabricListener
from triptych_fabric.receiver.peer import FabricPeer, ReceiverParts
from triptych_fabric.receiver.reception import ByteBudget
from triptych_fabric.sender.links import OutgoingLinks
from triptych_fabric.sender.transfers import PlacedOrder, Result, TransferTable
from triptych_fabric.settings import FabricSettings
from triptych_fabric.transports.nixl import NixlTransport, usable_transports
from triptych_fabric.transports.transport import RateLimit, Transport
from triptych_fabric.wire.handshake import Identity
from triptych_fabric.wire.keys import Credentials

log = get_logger(__name__)

RESULTS_LIMIT_S = 2.0  # at the end, for results that Redis has not taken yet, and as long for acks of orders


async def run_fabric(settings: FabricSettings, stop: StopSignal) -> None:
    """Serve until `stop`, then drain.

    Raises:
        TriptychError: keys, store, Redis or port cannot be used; the caller exits and is restarted.
    """
    credentials = settings.credentials()
    tracing = setup_service_tracing("fabric", settings)
    try:
        async with FabricAgent.open(settings, credentials) as agent:
            await agent.run(stop)
    finally:
        await asyncio.to_thread(tracing.shutdown)


class FabricAgent:
    """Fabric agent: `open` connects and disconnects, `run` carries entries until stopped, and drains."""

    def __init__(
        self,
        settings: FabricSettings,
        credentials: Credentials,
        store: LocalStore,
        bus: AsyncBus,
        metrics: FabricMetrics,
        store_changed: asyncio.Event,
    ) -> None:
        """`store_changed` is set when the store restarted or is gone for good."""
        self._settings = settings
        timeout_s = settings.fabric_progress_timeout_s
        kinds = usable_transports(settings.fabric_transports, settings.fabric_listen_host)
        self._transports = {
            kind: NixlTransport(store.mapping, timeout_s) if kind is FabricTransport.NIXL else Transport()
            for kind in kinds
        }
        self._credentials = credentials
        self._store = store
        self._bus = bus
        self._registry = Registry(bus)
        self._metrics = metrics
        self._store_changed = store_changed
        self._identity = Identity(store.name, store.generation, kinds)
        self._budget = ByteBudget(settings.fabric_max_bytes_in_flight)
        rate = RateLimit(settings.fabric_max_rate)
        self._links = OutgoingLinks(
            store.name, self._find_agent, self._transports, credentials, rate, timeout_s
        )
        self._load = AgentLoad(store, self._links)
        for each in kinds:
            metrics.links.labels(each.value).set_function(partial(self._links.num_up, each))
        metrics.reserved_bytes.set_function(lambda: self._budget.num_bytes)

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: FabricSettings, credentials: Credentials) -> "AsyncIterator[FabricAgent]":
        """Connect; raises TriptychError if store, Redis or the metrics port is unusable."""
        store_changed = asyncio.Event()
        metrics = FabricMetrics()
        async with contextlib.AsyncExitStack() as stack:
            scrapes = ScrapeServer(metrics.metrics.render)
            stack.push_async_callback(scrapes.close)
            await scrapes.serve(settings)
            bus = await AsyncBus.connect(
                settings.redis_url, settings.deployment, client_name=settings.instance
            )
            stack.push_async_callback(bus.close)
            store = await LocalStore.connect(
                settings.store_socket, settings.instance, on_changed=store_changed.set
            )
            stack.push_async_callback(store.close)
            yield cls(settings, credentials, store, bus, metrics, store_changed)

    async def run(self, stop: StopSignal) -> None:
        """Register, carry entries until `stop` is set, drain, deregister.

        Raises:
            TriptychError: the store or Redis cannot be used any more, or the port cannot be listened on.
        """
        settings = self._settings
        try:
            async with asyncio.TaskGroup() as group:
                parts = ReceiverParts(
                    self._identity,
                    self._credentials,
                    self._store,
                    self._budget,
                    self._metrics,
                    group,
                    self._transports,
                    settings.fabric_progress_timeout_s,
                )
                listener = FabricListener(partial(FabricPeer, parts))
                listener.serve(settings.fabric_listen_host, settings.fabric_port)
                self._metrics.peers.set_function(lambda: listener.num_peers)
                try:
                    async with self._registry.keep_registered(
                        self._record(), read_fields=self._load.fields
                    ) as registration:
                        log.info("fabric agent ready", store=self._store.name)
                        await self._carry(stop, registration, listener, group)
                finally:
                    await listener.close(settings.fabric_progress_timeout_s)  # first: it writes
                    await self._links.close()
        except* TriptychError as failures:
            raise first_failure(failures) from None
        await self._registry.clear_inboxes(settings.instance)

    async def _carry(
        self, stop: StopSignal, registration: Registration, listener: FabricListener, group: asyncio.TaskGroup
    ) -> None:
        reader = OrderReader(self._bus, self._settings.instance, group)

        def on_result(placed: PlacedOrder, result: Result) -> None:
            self._load.on_result(result)
            reader.on_result(placed, result)

        table = TransferTable(self._store, self._links, self._metrics, group, on_result)
        self._metrics.num_orders.set_function(lambda: table.num_orders)
        reading = group.create_task(reader.run(table))
        others = [
            group.create_task(self._load.run()),
            group.create_task(self._follow_store(registration, listener)),
        ]
        await stop.wait()
        log.info("draining", num_orders=table.num_orders)
        self._identity.is_draining = True
        reader.stop()
        await registration.announce_draining()
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await table.wait_idle()
                for peer in listener.peers:
                    await peer.wait_idle()
        except TimeoutError:
            log.warning("drain timeout: unfinished transfers cancelled", num_orders=table.num_orders)
            table.fail_all(TransferFailureKind.UNREACHABLE, "the source's agent ends")
        await reader.finish_sending(RESULTS_LIMIT_S)
        await asyncio.wait({reading}, timeout=RESULTS_LIMIT_S)
        for task in (reading, *others):
            task.cancel()

    async def _follow_store(self, registration: Registration, listener: FabricListener) -> None:
        """Announce each new generation of the store; incoming entries of the previous one are cut off.

        Raises:
            StoreUnavailableError: the store is gone for good.
        """
        while True:
            await self._store_changed.wait()
            self._store_changed.clear()
            if self._store.is_lost:
                raise StoreUnavailableError("the cache store went away")
            if self._store.generation == self._identity.generation:
                continue
            self._identity.generation = self._store.generation
            listener.close_peers()
            log.info("the store was restarted", generation=self._store.generation)
            with contextlib.suppress(BusUnavailableError):  # it goes out with the next heartbeat
                await registration.update(fabric=self._endpoint())

    async def _find_agent(self, store: str) -> InstanceRecord | None:
        for record in await self._registry.list_instances():
            is_its = record.role is Role.FABRIC and record.store == store
            if is_its and record.fabric is not None and not record.draining:
                return record
        return None

    def _endpoint(self) -> FabricEndpoint:
        settings = self._settings
        return FabricEndpoint(
            host=settings.advertised_host,
            port=settings.fabric_port,
            generation=self._store.generation,
            transports=tuple(self._transports),
        )

    def _record(self) -> InstanceRecord:
        return InstanceRecord(
            instance=self._settings.instance,
            release=release(),
            boot_id=uuid.uuid4().hex,
            role=Role.FABRIC,
            store=self._store.name,
            host=self._settings.host_name,
            fabric=self._endpoint(),
        )
