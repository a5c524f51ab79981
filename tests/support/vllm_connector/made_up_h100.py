"""An H100 that vLLM finds and that is not there: for what it decides from the device, such as configurations.

`install` comes before vLLM's first import. No kernel runs; what asks the device for more than it is fails.
"""

import importlib
from types import SimpleNamespace

import torch

NAME = "NVIDIA H100 80GB HBM3"
NUM_BYTES = 81559 << 20
CAPABILITY = (9, 0)
UUID = "GPU-00000000-0000-0000-0000-00000000000a"


def install() -> None:
    """Make torch, Triton and NVIDIA's management library answer as on a machine with one H100."""
    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=NUM_BYTES, multi_processor_count=132, is_integrated=False,
        warp_size=32,
    )  # fmt: skip
    importlib.import_module("torchvision")  # its operators load for the torch that is there: that changes now
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
    torch.cuda.get_device_properties = lambda device=None: properties
    importlib.import_module("triton.backends").backends["nvidia"].driver.is_active = staticmethod(
        lambda: True
    )
    from vllm.third_party import pynvml  # a file of its own: it asks vLLM for no platform

    pynvml.nvmlInit = lambda: None
    pynvml.nvmlShutdown = lambda: None
    pynvml.nvmlDeviceGetCount = lambda: 1
    pynvml.nvmlDeviceGetHandleByIndex = lambda index: index
    pynvml.nvmlDeviceGetCudaComputeCapability = lambda handle: CAPABILITY
    pynvml.nvmlDeviceGetName = lambda handle: NAME
    pynvml.nvmlDeviceGetUUID = lambda handle: UUID
    pynvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=NUM_BYTES)
