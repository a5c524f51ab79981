"""Which kind of vLLM runs here."""

import torch


def has_gpu() -> bool:
    """Whether vLLM will use an NVIDIA GPU: torch was built for CUDA, and sees a device."""
    return torch.version.cuda is not None and torch.cuda.is_available()


def gpu_uuid() -> str | None:
    """UUID ("GPU-...") of the first GPU that vLLM will use; None without one. Makes no CUDA context."""
    if not has_gpu():
        return None
    from vllm.platforms import current_platform

    uuid: str = current_platform.get_device_uuid(0)
    return uuid if uuid.startswith("GPU-") else None  # a slice of a GPU cannot share memory by CUDA IPC
