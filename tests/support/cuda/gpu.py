"""Why tests on a GPU cannot run here. Imports nothing that only such a machine has."""


def why_no_gpu() -> str | None:
    """None: torch sees an NVIDIA GPU, so whatever is missing now is a fault."""
    try:
        import torch
    except ImportError:
        return "torch is not installed; these tests need a CUDA build of it, and an NVIDIA GPU"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not built for CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no NVIDIA GPU"
    return None
