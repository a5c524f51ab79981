"""The slab: the store's memory on a GPU, where one is asked for and there is one."""

from triptych_cache_store.core.state import Slab
from triptych_cache_store.entries.block_pool import BestFitPool
from triptych_cache_store.entries.entry_journal import EntryJournal
from triptych_cache_store.entries.entry_table import EntryTable
from triptych_cache_store.entries.eviction import RecencyAndCostPolicy
from triptych_cache_store.entries.limits import Limits
from triptych_cache_store.entries.space import Space
from triptych_cache_store.settings import StoreSettings
from triptych_common.protocol.store import SlabInfo
from triptych_common.region.cuda.driver import CudaError
from triptych_common.region.cuda.loading import load_driver
from triptych_common.region.cuda.slab import DeviceSlab
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)


def open_slab(settings: StoreSettings) -> DeviceSlab | None:
    """None when none is asked for, or there is no GPU for it: then tensors go through the region."""
    num_bytes = settings.slab_bytes // settings.block_bytes * settings.block_bytes
    if num_bytes == 0:
        return None
    try:
        slab = DeviceSlab(load_driver(settings.slab_device), num_bytes)
    except CudaError as error:
        log.warning("device memory cannot be used", error=str(error))
        return None
    log.info("device memory is up", memory=slab.info.memory, num_bytes=num_bytes)
    return slab


def make_slab(info: SlabInfo, table: EntryTable, block_num_bytes: int, reserve_fraction: float = 0.0) -> Slab:
    """Books for the device memory: a pool of its own, the same table. Nothing of it outlives the store."""
    num_blocks = info.num_bytes // block_num_bytes
    limits = Limits(num_reserve_blocks=int(reserve_fraction * num_blocks))
    return Slab(info, Space(table, BestFitPool(num_blocks), RecencyAndCostPolicy(), EntryJournal(), limits))
