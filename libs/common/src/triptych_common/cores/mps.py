"""NVIDIA's Multi-Process Service on this host: presence of its control daemon, and a process's limits.

Triptych starts no daemon and changes none. CUDA looks for one when a process first uses a GPU, and goes on
without where it does not answer; so only the driver of a worker can tell that MPS is really used.
"""

from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict

CONTROL = "control"
"""Name of the control daemon's socket in its directory."""


class CudaEnvironment(BaseSettings):
    model_config = SettingsConfigDict(extra="ignore", env_ignore_empty=True)

    cuda_visible_devices: str | None = None
    cuda_mps_pipe_directory: Path = Path("/tmp/nvidia-mps")  # CUDA's default
    cuda_mps_active_thread_percentage: str | None = None
    cuda_mps_client_priority: str | None = None


def has_mps_daemon() -> bool:
    """Return whether a control daemon's socket exists where CUDA looks for it; does not connect.

    One in a directory that this user may not read is no daemon for it either.
    """
    try:
        return (CudaEnvironment().cuda_mps_pipe_directory / CONTROL).exists()
    except PermissionError:
        return False
