"""One project of compose.yaml on a real Docker engine, driven by the docker command."""

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
UP = ("up", "--detach", "--wait", "--wait-timeout", "480")
UP_LIMIT_S = 500.0
COMMAND_LIMIT_S = 120.0


@dataclass
class Compose:
    """One compose project of this test run, on a port of its own."""

    project: str
    port: int
    env: dict[str, str]
    has_started: bool = field(default=False, init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, *arguments: str, limit_s: float = COMMAND_LIMIT_S) -> str:
        """stdout of `docker compose ARGUMENTS`; a failure fails the test, with the last log lines."""
        done = self.attempt(*arguments, limit_s=limit_s)
        if done.returncode:
            logs = self.attempt("logs", "--no-color", "--tail", "40").stdout if self.has_started else ""
            pytest.fail(f"docker compose {' '.join(arguments)}:\n{done.stderr[-4000:]}\n{logs[-12000:]}")
        return done.stdout

    def up(self, *arguments: str) -> None:
        """Start what does not run yet; returns when every service is healthy."""
        self.has_started = True
        self.run(*UP, *arguments, limit_s=UP_LIMIT_S)

    def attempt(self, *arguments: str, limit_s: float = COMMAND_LIMIT_S) -> subprocess.CompletedProcess[str]:
        command = ["docker", "compose", "--project-name", self.project, "--ansi", "never", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=limit_s, check=False
        )

    def execute(self, service: str, *command: str, index: int = 1) -> subprocess.CompletedProcess[str]:
        """Run `command` in a container of `service`."""
        return self.attempt("exec", "-T", "--index", str(index), service, *command)

    def inspect(self, service: str, index: int = 1) -> dict[str, Any]:
        """What the engine reports about a container of `service`."""
        listed: list[dict[str, Any]] = json.loads(docker("inspect", f"{self.project}-{service}-{index}"))
        return listed[0]

    def leftovers(self) -> list[str]:
        """Containers, volumes and networks of this project."""
        label = f"label=com.docker.compose.project={self.project}"
        return [
            *docker("ps", "--all", "--quiet", "--filter", label).split(),
            *docker("volume", "ls", "--quiet", "--filter", label).split(),
            *docker("network", "ls", "--quiet", "--filter", label).split(),
        ]


def docker(*arguments: str, limit_s: float = COMMAND_LIMIT_S) -> str:
    return subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=limit_s, check=True
    ).stdout
