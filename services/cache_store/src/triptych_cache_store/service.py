"""Assembles the daemon (region, core, server), runs it and ends it."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path

from triptych_cache_store.checksums.verifier import Checksums, Verifier
from triptych_cache_store.core.metrics import render
from triptych_cache_store.core.recovery import recover, trust
from triptych_cache_store.core.state import Slab, StoreIdentity, StoreState
from triptych_cache_store.core.store_core import StoreCore
from triptych_cache_store.entries.block_pool import BestFitPool
from triptych_cache_store.entries.entry_table import EntryTable
from triptych_cache_store.entries.leases import SessionId
from triptych_cache_store.entries.space import EntryJournal, EvictionPolicy, Limits, Space
from triptych_cache_store.persistence.journal import RegionJournal
from triptych_cache_store.persistence.region_file import SYSFS, RegionFile, region_node
from triptych_cache_store.server import Connections, StoreServer
from triptych_cache_store.settings import StoreSettings
from triptych_common.domain.errors import StoreUnavailableError, TriptychError
from triptych_common.protocol.store import Ping, SlabInfo
from triptych_common.region.cuda.driver import CudaDriver, CudaError
from triptych_common.region.cuda.loading import load_driver
from triptych_common.region.cuda.slab import DeviceSlab
from triptych_common.region.layout import RegionLayout
from triptych_common.runtime import StopSignal
from triptych_common.runtime.scrape_server import ScrapeServer
from triptych_common.store_session.async_session import AsyncStoreSession
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

HOLD_S = 2.0
"""Seconds for which blocks of a dead writer are held where a GPU may still run its copies."""
SLAB_GRANULE_BYTES = 2 << 20
"""Unit of CUDA's own allocations: a slab of less shares its memory, and so its handle, with others."""
SLAB_TIMEOUT_S, SLAB_RETRY_S = 10.0, 0.5
NVIDIA_CONTROL = Path("/dev/nvidiactl")


async def open_slab(settings: StoreSettings, stop: StopSignal) -> DeviceSlab | None:
    """Device memory for tensors; None if not configured or unavailable: tensors then use the region."""
    num_bytes = math.ceil(settings.slab_bytes / SLAB_GRANULE_BYTES) * SLAB_GRANULE_BYTES
    if num_bytes == 0:
        return None
    try:
        driver = await asyncio.to_thread(load_driver, settings.slab_device)
        slab = await _allocate(driver, num_bytes, stop)
    except CudaError as error:
        log.warning("device memory cannot be used", error=str(error))
        return None
    log.info("device memory is up", memory=slab.info.memory, num_bytes=num_bytes)
    return slab


async def _allocate(driver: CudaDriver, num_bytes: int, stop: StopSignal) -> DeviceSlab:
    """Slab, for which the GPU may lack memory at first: workers unmap that of a store that crashed.

    Raises:
        CudaError: there is no memory for it, also after `SLAB_TIMEOUT_S`.
    """

    def allocate() -> DeviceSlab:
        driver.bind_thread()
        return DeviceSlab(driver, num_bytes)

    deadline = time.monotonic() + SLAB_TIMEOUT_S
    while True:
        try:
            return await asyncio.to_thread(allocate)
        except CudaError as error:
            if stop.is_set or time.monotonic() >= deadline:
                raise
            log.info("device memory is waited for", num_bytes=num_bytes, error=str(error))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SLAB_RETRY_S):
                await stop.wait()


def has_nvidia_driver() -> bool:
    """True if a process of this machine may write through an NVIDIA GPU."""
    return NVIDIA_CONTROL.exists()


def make_slab(info: SlabInfo, table: EntryTable, block_num_bytes: int, reserve_fraction: float = 0.0) -> Slab:
    """Bookkeeping of the device memory: its own pool, the shared table. It ends with the store."""
    num_blocks = info.num_bytes // block_num_bytes
    limits = Limits(num_reserve_blocks=int(reserve_fraction * num_blocks))
    space = Space(table, BestFitPool(num_blocks), EvictionPolicy(), EntryJournal(), limits, hold_s=HOLD_S)
    return Slab(info, space)


async def run_store(settings: StoreSettings, stop: StopSignal) -> None:
    """Serve until `stop`.

    Raises:
        RegionLayoutError: the region cannot be used, or the tmpfs has not enough memory for it.
        StoreUnavailableError: the socket cannot be made.
        ListenError: metrics cannot be served where it is set.
    """
    layout = RegionLayout.fit(settings.region_bytes, settings.block_bytes)
    region = RegionFile.open(settings.region_path, layout, time.time())
    failure: list[str] = []
    loop = asyncio.get_running_loop()

    def on_prefault_failure(detail: str) -> None:
        failure.append(detail)
        loop.call_soon_threadsafe(stop.set, "prefault failed")

    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, region.close, unlink=not settings.keep_region)
        slab = await open_slab(settings, stop)
        node = region_node(SYSFS, None if slab is None else slab.pci_bus_id)
        if node is not None and region.prefer_node(node):
            log.info("region lies beside the GPU", node=node)
        connections = Connections()
        core = make_core(settings, region, connections.is_connected, None if slab is None else slab.info)
        verifier = Verifier(
            core.state,
            region.buffer,
            connections.deliver,
            interval_s=settings.verify_interval_s if settings.verify == "always" else None,
        )
        stack.push_async_callback(verifier.close)
        server = StoreServer(core, connections, verifier.wake, max_unsent_bytes=settings.max_unsent_bytes)
        stack.push_async_callback(server.close)
        scrapes = ScrapeServer(lambda: render(core.state, time.monotonic()).encode())
        stack.push_async_callback(scrapes.close)
        verifier.start()
        region.start_prefault(on_prefault_failure, large_pages=settings.large_pages)
        await server.serve(settings.store_socket)
        server.watch_detached()
        await scrapes.serve(settings)
        log.info("store is up", num_blocks=layout.num_blocks, block_num_bytes=layout.block_num_bytes)
        await stop.wait()
    if failure:
        raise StoreUnavailableError(failure[0])
    log.info("store is down", reason=stop.reason)


def make_core(
    settings: StoreSettings,
    region: RegionFile,
    is_connected: Callable[[SessionId], bool],
    slab: SlabInfo | None = None,
) -> StoreCore:
    """Core on `region`, restored from what an earlier store left there."""
    layout = region.header.layout
    identity = StoreIdentity(
        store=settings.instance,
        region_path=str(settings.region_path),
        region_id=region.header.region_id.hex(),
        generation=region.header.generation,
        layout=layout,
    )
    state = make_state(region.buffer, identity, settings.limits(layout), slab, settings.reserve_fraction)
    state.verify_queue.takes_checksums = settings.verify != "off"
    state.space.hold_s = HOLD_S if has_nvidia_driver() or slab is not None else 0.0
    if not region.is_new:
        recovered = recover(
            state,
            is_alive=region.is_client_alive,
            namespace=settings.namespace_digest,
            now=time.monotonic(),
            is_intact=Checksums(region.buffer, layout).has_checksum if settings.verify != "off" else trust,
        )
        log.info("region recovered", **asdict(recovered))
    return StoreCore(state, is_connected=is_connected, is_alive=region.is_client_alive)


def make_state(
    buffer: memoryview,
    identity: StoreIdentity,
    limits: Limits,
    slab: SlabInfo | None,
    reserve_fraction: float = 0.0,
) -> StoreState:
    """State with empty tables over the region in `buffer`."""
    layout = identity.layout
    journal, table = RegionJournal(buffer, layout), EntryTable(layout.block_num_bytes)
    space = Space(table, BestFitPool(layout.num_blocks), EvictionPolicy(), journal, limits)
    books = None if slab is None else make_slab(slab, table, layout.block_num_bytes, reserve_fraction)
    return StoreState(identity, space, journal, slab=books)


async def is_healthy(settings: StoreSettings, client_name: str) -> bool:
    """True if the store of `settings` answers a ping."""
    try:
        async with await AsyncStoreSession.connect(
            settings.store_socket, client_name, timeout_s=2.0
        ) as session:
            await session.request(Ping(seq=0), timeout_s=2.0)
    except TriptychError as error:
        log.warning("store is not healthy", error=str(error))
        return False
    return True
