"""Where one running system keeps its files."""

from dataclasses import dataclass
from pathlib import Path

from triptych_cli.settings import CliSettings

MAX_SOCKET_PATH_BYTES = 105  # the kernel allows 107
SUPERVISOR = "supervisor"  # the name of its log, beside those of its services


@dataclass(frozen=True)
class RunLayout:
    """`run_dir` (tmpfs) holds what vanishes with the system: sockets, region, state. `state_dir` (disk) holds
    logs, traces and uploaded files, which may grow and stay afterwards.
    """

    run_dir: Path
    state_dir: Path
    log_max_bytes: int = 64 << 20  # of each service's logs

    @property
    def redis_socket(self) -> Path:
        return self.run_dir / "redis.sock"

    @property
    def redis_config(self) -> Path:
        """Of the embedded Redis where it has a password: command lines are seen by other users."""
        return self.run_dir / "redis.conf"

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
        """Where the supervisor accepts restart requests."""
        return self.run_dir / "supervisor.sock"

    @property
    def lock_file(self) -> Path:
        """The supervisor holds a lock on it while it runs."""
        return self.run_dir / "supervisor.lock"

    @property
    def logs_dir(self) -> Path:
        return self.state_dir / "logs"

    @property
    def traces_dir(self) -> Path:
        return self.state_dir / "traces"

    @property
    def compiled_dir(self) -> Path:
        """Code that torch has compiled for engines. It stays when the system ends."""
        return self.state_dir / "compiled"

    @property
    def join_dir(self) -> Path:
        """What other hosts need in order to join (`shared_secrets`). It stays when the system ends."""
        return self.state_dir / "join"

    @property
    def files_dir(self) -> Path:
        """What callers have uploaded. It stays when the system ends."""
        return self.state_dir / "files"

    def log_file(self, service: str) -> Path:
        return self.logs_dir / f"{service}.log"


def lasting_layout(settings: CliSettings) -> RunLayout:
    """The folders of the system that `up` starts."""
    return RunLayout(settings.run_dir, settings.state_dir / settings.run_dir.name, settings.log_max_bytes)
