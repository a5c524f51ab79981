"""Make this process's `CudaDriver`, or report why there is none. Loads NVIDIA's bindings on demand."""

import importlib
import importlib.util

from triptych_common.region.cuda.driver import CudaDriver, CudaError


def has_bindings() -> bool:
    """Return whether NVIDIA's Python bindings are installed; loads nothing."""
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # nothing called `cuda` at all
        return False


def load_driver(device: int = 0) -> CudaDriver:
    """Return the driver of GPU number `device` among those this process may see.

    Raises:
        CudaError: NVIDIA's Python bindings are not installed, or no GPU can be used; the text names which.
    """
    try:
        runtime = importlib.import_module("triptych_common.region.cuda.runtime")
    except ImportError as error:
        raise CudaError(
            f"NVIDIA's Python bindings cannot be loaded ({error}); pip install 'triptych-common[cuda]'"
        ) from error
    driver: CudaDriver = runtime.RuntimeDriver(device)
    return driver
