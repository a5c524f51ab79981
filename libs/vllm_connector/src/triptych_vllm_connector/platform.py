"""Which kind of vLLM runs here."""

from collections.abc import Sequence

import torch

from triptych_common.region.cuda.driver import has_bindings
from triptych_vllm_connector.engine_options import option_value


def has_gpu() -> bool:
    """Whether vLLM will use an NVIDIA GPU: torch was built for CUDA, and sees a device."""
    return torch.version.cuda is not None and torch.cuda.is_available()


def slab_device(engine_args: Sequence[str]) -> str | None:
    """UUID ("GPU-...") of the GPU whose memory this instance can share; makes no CUDA context.

    None without a GPU or NVIDIA's bindings, and for an engine that is spread over several GPUs.
    """
    parallel = {"--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"}
    if any(option_value(engine_args, name, "1") != "1" for name in parallel):
        return None
    if not has_gpu() or not has_bindings():
        return None
    from vllm.platforms import current_platform

    uuid: str = current_platform.get_device_uuid(0)
    return uuid if uuid.startswith("GPU-") else None  # a slice of a GPU cannot share memory by CUDA IPC
