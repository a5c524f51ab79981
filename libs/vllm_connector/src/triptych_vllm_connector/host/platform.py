"""Resources of this machine for one engine: a GPU, and the store's region."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from triptych_common.domain.engine_args import option_value
from triptych_common.domain.errors import StoreError
from triptych_common.region import RegionMapping
from triptych_common.store_session import StoreSession
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

REGION_CHECK_TIMEOUT_S = 5.0


def has_gpu() -> bool:
    """True if vLLM will use an NVIDIA GPU: torch was built for CUDA, and sees a device."""
    return torch.version.cuda is not None and torch.cuda.is_available()


def gpus_are_busy() -> bool:
    """True if a visible GPU computes at this moment, or cannot be asked (MIG); makes no CUDA context."""
    if not has_gpu():
        return False
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import import_pynvml

    nvml = import_pynvml()
    try:
        nvml.nvmlInit()
        try:
            uuids = [current_platform.get_device_uuid(index) for index in range(torch.cuda.device_count())]
            handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
            return any(nvml.nvmlDeviceGetUtilizationRates(handle).gpu > 0 for handle in handles)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        log.info("GPU utilization cannot be asked", error=str(error))
        return True


def may_use_slab(engine_args: Sequence[str]) -> bool:
    """True if the engine's worker should probe the store's GPU memory; makes no CUDA context.

    False without a GPU, and for an engine that is spread over several.
    """
    parallel = (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp"))
    return has_gpu() and all(option_value(engine_args, *names) in (None, "1") for names in parallel)


@dataclass(frozen=True)
class FoundStore:
    store: str | None = None  # its name; None: it could not be asked
    has_region: bool = False  # this process can map its region


def probe_store(socket: Path, instance: str) -> FoundStore:
    """Look at the store at `socket`. Blocks for seconds at most."""
    store: str | None = None
    try:
        session = StoreSession.connect(socket, f"{instance}/probe", timeout_s=REGION_CHECK_TIMEOUT_S)
        try:
            welcome = session.welcome
            store = welcome.store
            RegionMapping.open(welcome.region_path, welcome.region_num_bytes, populate=False).close()
        finally:
            session.close()
    except StoreError as error:
        log.warning("the region cannot be used", error=str(error))
        return FoundStore(store)
    return FoundStore(store, has_region=True)
