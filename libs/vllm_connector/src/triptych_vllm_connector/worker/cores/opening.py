"""Opens the share of this worker, by its platform; vLLM has chosen the worker's GPU before."""

from typing import Protocol

import torch

from triptych_common.cores.mps import CudaEnvironment
from triptych_common.protocol.messages import Compute, Sharing
from triptych_common.region.cuda.driver import CudaDriver, CudaError
from triptych_common.region.cuda.loading import load_driver
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.worker.cores.compute_share import ComputeShare, FixedShare
from triptych_vllm_connector.worker.cores.core_share import CoreShare

log = get_logger(__name__)


class GpuFacts(Protocol):
    """Facts of a GPU that `region.cuda.driver.CudaDriver` reports."""

    def device_uuid(self) -> str: ...

    def is_mps_client(self) -> bool: ...

    def num_multiprocessors(self) -> int: ...


def gpu_share(config: ConnectorConfig, driver: GpuFacts | None, environment: CudaEnvironment) -> FixedShare:
    """Share of a GPU; `driver` is None if NVIDIA's bindings are missing."""
    compute = gpu_compute(config, driver, environment)
    log.info(
        "gpu of this worker",
        gpu=compute.gpu,
        num_engines=compute.num_engines,
        sharing=compute.sharing.value,
        policy=compute.policy,
        num_multiprocessors=compute.num_multiprocessors,
    )
    if compute.sharing is Sharing.TIME_SLICES and _has_limits(environment):
        log.warning("limits of MPS have no effect", pipe_directory=str(environment.cuda_mps_pipe_directory))
    return FixedShare(compute)


def gpu_compute(config: ConnectorConfig, driver: GpuFacts | None, environment: CudaEnvironment) -> Compute:
    """Actual sharing, which may differ from the plan: a control daemon may not answer."""
    gpu = environment.cuda_visible_devices
    sharing = Sharing.UNKNOWN
    num_multiprocessors: int | None = None
    if driver is not None:
        try:
            gpu = gpu or driver.device_uuid()
            num_multiprocessors = driver.num_multiprocessors()
            sharing = Sharing.MPS if driver.is_mps_client() else _without_mps(config.gpu_engines)
        except CudaError as error:
            log.warning("gpu not known", error=str(error))
    has_mps = sharing is Sharing.MPS
    return Compute(
        sharing=sharing,
        policy=config.core_policy if has_mps and _has_limits(environment) else None,
        gpu=gpu or "unknown",
        num_engines=config.gpu_engines,
        num_multiprocessors=num_multiprocessors,
        thread_percentage=environment.cuda_mps_active_thread_percentage if has_mps else None,
        priority=environment.cuda_mps_client_priority if has_mps else None,
    )


def _without_mps(num_engines: int) -> Sharing:
    return Sharing.TIME_SLICES if num_engines > 1 else Sharing.NONE


def _has_limits(environment: CudaEnvironment) -> bool:
    limits = (environment.cuda_mps_active_thread_percentage, environment.cuda_mps_client_priority)
    return any(limit is not None for limit in limits)


def open_share(config: ConnectorConfig, device_type: str, num_ranks: int) -> ComputeShare:
    """Open the share for vLLM's `device_type` of this worker."""
    if device_type == "cpu":
        return CoreShare.open(config, num_ranks) or FixedShare(own_threads(config))
    if device_type != "cuda":
        return FixedShare(Compute(sharing=Sharing.UNKNOWN))
    return gpu_share(config, _driver(), CudaEnvironment())


def own_threads(config: ConnectorConfig) -> Compute:
    """Description of a CPU engine that shares no cores."""
    is_split = config.core_policy == "split" and bool(config.cores)
    return Compute(sharing=Sharing.NONE, policy=config.core_policy if is_split else None, cores=config.cores)


def _driver() -> CudaDriver | None:
    """CUDA driver; None if NVIDIA's bindings are missing, which the transports log."""
    try:
        return load_driver(torch.cuda.current_device())
    except CudaError:
        return None
