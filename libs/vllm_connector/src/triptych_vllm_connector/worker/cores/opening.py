"""Opens the share of this worker, by its platform; vLLM has chosen the worker's GPU before."""

import torch

from triptych_common.cores.mps import CudaEnvironment
from triptych_common.protocol.messages import Compute, Sharing
from triptych_common.region.cuda.driver import CudaDriver, CudaError
from triptych_common.region.cuda.loading import load_driver
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.worker.cores.compute_share import ComputeShare, FixedShare
from triptych_vllm_connector.worker.cores.core_share import CoreShare
from triptych_vllm_connector.worker.cores.gpu_share import gpu_share


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
