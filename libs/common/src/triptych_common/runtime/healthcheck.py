"""`python -m triptych_common.runtime.healthcheck PACKAGE...`: health check of a container, ending a service
that hangs.

Docker restarts a container that has ended, and not one that is unhealthy. So this runs the service's own
check, `python -m PACKAGE... healthcheck`, hands its exit code on, and kills the service when that was 2 (it
does not answer) in checks in a row, without progress in between (`liveness`). Checks count only once the
process was healthy: one that loads a model may wait for the network for long.

`--liveness PACKAGE...` is for Kubernetes, which ends a container itself: exit code 1 when the service hangs,
else 0, and nothing is killed.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from triptych_common.runtime.liveness import Activity, HangCount, activity_of
from triptych_common.runtime.settings import default_run_dir

LIVENESS = "--liveness"
HANGS = "service hangs: it does not answer and uses no CPU time"
HEALTHY, NOT_READY, NO_ANSWER = 0, 1, 2
"""Exit codes of a service's own check. NOT_READY: it answers, or whether it does cannot be known."""


def exit_code(answers: bool | None) -> int:
    """Return the exit code of a service that is ready when it answers; None means unknown."""
    return NOT_READY if answers is None else HEALTHY if answers else NO_ANSWER


class HealthcheckSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="TRIPTYCH_", env_ignore_empty=True, extra="ignore")

    run_dir: Path = Field(default_factory=default_run_dir)


@dataclass(frozen=True)
class LastCheck:
    """State that one check leaves for the next, which is another process."""

    pid: int
    started_at: str  # of the process, in the kernel's ticks: a later one may get the same pid
    used_s: float
    num_still: int
    at_s: float  # of the monotonic clock, which all processes share


def check_liveness(file: Path, pid: int, code: int, proc: Path = Path("/proc")) -> bool:
    """Record one check of process `pid`, which ended with `code`; return whether the process hangs."""
    activity = activity_of(pid, proc)
    now = LastCheck(pid, _started_at(proc / str(pid)), activity.used_s, 0, time.monotonic())
    before = _read(file)
    if code == HEALTHY:
        _write(file, now)
    if code != NO_ANSWER or before is None or (before.pid, before.started_at) != (pid, now.started_at):
        return False
    count = HangCount(Activity(before.used_s, frozenset()))
    count.num_still = before.num_still
    count.count(False, activity, now.at_s - before.at_s)
    _write(file, LastCheck(**asdict(now) | {"num_still": count.num_still}))
    return count.is_hung


def main_process(words: Sequence[str], proc: Path = Path("/proc")) -> int | None:
    """Return the first process here that runs `python -m WORDS...`; other containers may share its ids."""
    found = [
        (int(_started_at(folder)), int(folder.name))
        for folder in _processes_here(proc)
        if _arguments(folder)[1 : 2 + len(words)] == ["-m", *words]
        and "healthcheck" not in _arguments(folder)
    ]
    return min(found)[1] if found else None


def _processes_here(proc: Path) -> Iterator[Path]:
    own = (proc / "self" / "ns" / "mnt").readlink()
    for folder in proc.iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and (folder / "ns" / "mnt").readlink() == own:
                yield folder


def _arguments(folder: Path) -> list[str]:
    return (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")


def _started_at(folder: Path) -> str:
    return (folder / "stat").read_text().rpartition(")")[2].split()[19]


def _read(file: Path) -> LastCheck | None:
    try:
        return LastCheck(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write(file: Path, check: LastCheck) -> None:
    temporary = file.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(check)))
    temporary.replace(file)


def main(words: Sequence[str]) -> NoReturn:
    """Run the check of the service that `python -m WORDS...` starts; first may stand `--liveness`."""
    only_reports, words = words[:1] == [LIVENESS], [word for word in words if word != LIVENESS]
    code = subprocess.run([sys.executable, "-m", *words, "healthcheck"], check=False).returncode
    pid = main_process(words)
    with suppress(OSError):  # it has ended meanwhile, or nothing can be recorded
        file = HealthcheckSettings().run_dir / f"healthcheck-{socket.gethostname()}.json"
        hangs = pid is not None and check_liveness(file, pid, code)
        if only_reports:
            raise SystemExit(HANGS if hangs else HEALTHY)
        if pid is not None and hangs:
            # Docker keeps no output of health checks; the service's own log does.
            with suppress(OSError), Path(f"/proc/{pid}/fd/2").open("a") as log:
                log.write(f"{HANGS}; its health check ends it\n")
            os.kill(pid, signal.SIGKILL)
    raise SystemExit(HEALTHY if only_reports or code == HEALTHY else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
