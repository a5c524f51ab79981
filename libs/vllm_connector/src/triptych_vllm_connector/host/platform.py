"""Which kind of vLLM runs here."""

from collections.abc import Sequence

import torch

from triptych_vllm_connector.host.engine_options import option_value


def has_gpu() -> bool:
    """Whether vLLM will use an NVIDIA GPU: torch was built for CUDA, and sees a device."""
    return torch.version.cuda is not None and torch.cuda.is_available()


def may_use_slab(engine_args: Sequence[str]) -> bool:
    """Whether the engine's worker is to be asked for the store's memory on its GPU; makes no CUDA context.

    Not without a GPU, and not for an engine that is spread over several.
    """
    parallel = {"--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"}
    return has_gpu() and all(option_value(engine_args, name, "1") == "1" for name in parallel)
