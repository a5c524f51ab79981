"""Which kind of vLLM runs here."""

import torch


def has_gpu() -> bool:
    """Whether vLLM will use an NVIDIA GPU: torch was built for CUDA, and sees a device."""
    return torch.version.cuda is not None and torch.cuda.is_available()
