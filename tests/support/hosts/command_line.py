"""`./triptych` of one host: its folders, its network, its variables. Without engines."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.hosts.network import Host

SHARED_MEMORY = Path("/dev/shm")
LIMIT_S = 110.0
NO_ENGINES = ("--encoders=0", "--prefill-decodes=0", f"--region-bytes={64 << 20}")


@dataclass
class CommandLine:
    """`machine` None: the test's own."""

    run_dir: Path
    state_dir: Path
    machine: Host | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str, code: int | None = 0) -> str:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")},
            "TRIPTYCH_RUN_DIR": str(self.run_dir),
            "TRIPTYCH_STATE_DIR": str(self.state_dir),
            "COLUMNS": "200",
            **self.variables,
        }
        command = [sys.executable, "-m", "triptych_cli", *arguments]

        def run() -> "subprocess.CompletedProcess[str]":
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )

        done = run() if self.machine is None else self.machine.call(run)
        assert code is None or done.returncode == code, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("status", "--json", code=None))
        return found

    @property
    def join_dir(self) -> Path:
        return self.state_dir / self.run_dir.name / "join"


@contextmanager
def command_lines(*names: str) -> Iterator[list[CommandLine]]:
    """Of hosts by these names; nothing runs on them yet, and nothing is left at the end."""
    directory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    base = Path(tempfile.mkdtemp(prefix="triptych-test-", dir=directory))
    hosts = [CommandLine(base / name, base / f"state-{name}") for name in names]
    try:
        yield hosts
    finally:
        for each in reversed(hosts):
            each("down", code=None)
        shutil.rmtree(base)
