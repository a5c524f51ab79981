"""What one running system is made of on disk, and what its user chose."""

from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
MAX_SOCKET_PATH_BYTES = 105  # the kernel allows 107


@dataclass(frozen=True)
class RunLayout:
    """Where one running system keeps its files.

    `run_dir` (tmpfs) holds what must vanish with it: sockets, region, state. `state_dir` (disk) holds
    logs and traces, which may grow and may be looked at afterwards.
    """

    run_dir: Path
    state_dir: Path

    @property
    def redis_socket(self) -> Path:
        return self.run_dir / "redis.sock"

    @property
    def store_socket(self) -> Path:
        return self.run_dir / "store.sock"

    @property
    def tmp_dir(self) -> Path:
        """Temporary files of engines: sockets between their own processes, rendezvous files."""
        return self.run_dir / "tmp"

    @property
    def state_file(self) -> Path:
        return self.run_dir / "supervisor.json"

    @property
    def control_socket(self) -> Path:
        """Where the supervisor takes orders."""
        return self.run_dir / "supervisor.sock"

    @property
    def lock_file(self) -> Path:
        """Locked by the supervisor as long as it lives."""
        return self.run_dir / "supervisor.lock"

    @property
    def logs_dir(self) -> Path:
        return self.state_dir / "logs"

    @property
    def traces_dir(self) -> Path:
        return self.state_dir / "traces"

    def log_file(self, service: str) -> Path:
        return self.logs_dir / f"{service}.log"


@dataclass(frozen=True)
class Options:
    """What the user chose."""

    model: str
    model_is_local: bool
    gateway_port: int
    num_encoders: int = 1
    num_prefill_decodes: int = 1
    num_gateways: int = 1  # on gateway_port and the ports after it
    redis_url: str | None = None  # None: the embedded server
    deployment: str = "default"
    region_bytes: int = 256 * MIB
    encoder_args: tuple[str, ...] = ()
    prefill_decode_args: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()  # as in CUDA_VISIBLE_DEVICES; empty: engines run on the CPU
    slab_share: float = 0.0  # of the first GPU's memory, which the store takes there
