"""Settings that the command line reads from the environment, by the names that the services use."""

import os
from pathlib import Path

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from pydantic_settings import BaseSettings, SettingsConfigDict

from triptych_common.runtime.settings import default_run_dir, default_state_dir

CHECKOUT = Path(__file__).resolve().parents[4]
LOOPBACK = "127.0.0.1"
DEFAULT_MODEL = CHECKOUT / "models" / "digits-vl"


class CliSettings(BaseSettings):
    """Read once per command. Each field is `TRIPTYCH_<NAME>` in the environment."""

    model_config = SettingsConfigDict(env_prefix="TRIPTYCH_", env_ignore_empty=True, extra="ignore")

    run_dir: Path = Field(default_factory=default_run_dir)
    """Sockets and the region of the system that `up` starts, on a tmpfs; removed when the system ends."""
    state_dir: Path = Field(default_factory=default_state_dir)
    """Logs and traces of the system that `up` starts; kept when the system ends."""
    log_max_bytes: int = Field(default=64 << 20, ge=1 << 20)
    """Bytes of logs kept for each service that `up` starts; the oldest are removed."""
    deployment: str = "default"
    """Prefix of all streams and keys in Redis, so that several systems can share one server."""
    slab_bytes: NonNegativeInt | None = None
    """Bytes that the store takes on the first GPU for `cuda_ipc`; engines there get less. Not set: 2 % of
    that GPU, 256 MiB at least, where an encoder and text that takes its tensors share it; else none."""
    host: str = LOOPBACK
    """Address on which the gateways that `up` starts listen."""
    scale_target_s: PositiveFloat = 1.0
    """Seconds that work may wait for a stage that `up` scales, as in `--encoders 0..3`."""
    scale_cooldown_s: NonNegativeFloat = 60.0
    """Seconds without work for an instance after which it ends; at least twice its start."""
    transport: str = "auto"
    """Transport of tensors that the services are asked to use; the services read the same variable."""
    redis_url: str | None = Field(default=None, repr=False)
    """Redis of a system that `up` has not started, such as Compose's, for commands that inspect it."""
    store_socket: Path = Field(default_factory=lambda data: data["run_dir"] / "store.sock")
    """Socket of that system's store, for commands that inspect it."""
    traces_dir: Path | None = None
    """Folder of that system's traces, for commands that inspect it."""
    fabric_tls_cert_file: Path | None = None
    """Fabric agents show this certificate: without a `--fabric-key-file` they have no key then."""


class GpuSettings(BaseSettings):
    """The GPUs that the user allows, in CUDA's own variable."""

    model_config = SettingsConfigDict(extra="ignore")

    cuda_visible_devices: str | None = None


class HubSettings(BaseSettings):
    """Hub from which vLLM downloads models, in vLLM's own variable."""

    model_config = SettingsConfigDict(extra="ignore", env_ignore_empty=True)

    vllm_use_modelscope: bool = False


class OpenMpSettings(BaseSettings):
    """Threads of engines on CPUs, in OpenMP's and vLLM's own variables."""

    model_config = SettingsConfigDict(extra="ignore", env_ignore_empty=True)

    omp_num_threads: str | None = None
    vllm_cpu_omp_threads_bind: str | None = None

    @property
    def is_set(self) -> bool:
        """True if each engine keeps to its own cores and shares none."""
        return self.omp_num_threads is not None or self.vllm_cpu_omp_threads_bind is not None


def caller_environment() -> dict[str, str]:
    """Environment of this process for its children, which run in another directory."""
    environment = dict(os.environ)  # noqa: TID251 -- handed on, not read
    if config := environment.get("TRIPTYCH_CONFIG"):
        environment["TRIPTYCH_CONFIG"] = str(Path(config).absolute())
    return environment
