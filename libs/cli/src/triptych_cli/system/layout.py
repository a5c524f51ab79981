"""Layout of one running system's files."""

from dataclasses import dataclass
from pathlib import Path

from triptych_cli.settings import CliSettings

MAX_SOCKET_PATH_BYTES = 105  # the kernel allows 107
SUPERVISOR = "supervisor"  # the name of its log, beside those of its services


@dataclass(frozen=True)
class RunLayout:
    """`run_dir` (tmpfs) has what vanishes with the system: sockets, region, state. `state_dir` (disk) has
    logs, traces and uploaded files, which may grow and stay."""

    run_dir: Path
    state_dir: Path
    log_max_bytes: int = 64 << 20  # of each service's logs

    @property
    def redis_socket(self) -> Path:
        return self.run_dir / "redis.sock"

    @property
    def redis_config(self) -> Path:
        """Configuration of the embedded Redis with a password: command lines are visible to other users."""
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
        """Socket on which the supervisor accepts restart requests."""
        return self.run_dir / "supervisor.sock"

    @property
    def lock_file(self) -> Path:
        return self.run_dir / "supervisor.lock"

    @property
    def logs_dir(self) -> Path:
        return self.state_dir / "logs"

    @property
    def traces_dir(self) -> Path:
        return self.state_dir / "traces"

    @property
    def compiled_dir(self) -> Path:
        """Code that torch has compiled for engines; kept when the system ends."""
        return self.state_dir / "compiled"

    @property
    def join_dir(self) -> Path:
        """Files that other hosts need to join (`shared_secrets`); kept when the system ends."""
        return self.state_dir / "join"

    @property
    def files_dir(self) -> Path:
        """Files that callers have uploaded; kept when the system ends."""
        return self.state_dir / "files"

    def log_file(self, service: str) -> Path:
        return self.logs_dir / f"{service}.log"


def lasting_layout(settings: CliSettings) -> RunLayout:
    return RunLayout(settings.run_dir, settings.state_dir / settings.run_dir.name, settings.log_max_bytes)
