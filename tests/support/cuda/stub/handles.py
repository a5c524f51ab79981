"""Calls of a role, in a process of its own or in this one.

`send` and `receive` are apart, so that steps overlap.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tests.support.cuda.stub.roles import Role, answer

ROOT = Path(__file__).resolve().parents[4]
END_TIMEOUT_S = 20.0


class RoleError(Exception):
    """A role's method raised, or its process has ended."""


class RoleHandle(Protocol):
    """One role of a system."""

    def wait_started(self) -> None:
        """Wait until its worker is up; due once, before the first call. Raises RoleError."""

    def send(self, method: str, **arguments: Any) -> None: ...

    def receive(self) -> Any:
        """Return the result of the oldest call that was not received. Raises RoleError."""

    def call(self, method: str, **arguments: Any) -> Any: ...

    def kill(self) -> None:
        """End its process with SIGKILL; work that it has queued on the GPU may still run."""

    def close(self) -> None: ...


class RoleProcess:
    """A role in a process of its own, on the device "cuda" or "cpu"."""

    def __init__(self, role: str, instance: str, socket: Path, device: str, env: Mapping[str, str]) -> None:
        self._role = role
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.cuda.stub.roles", role, instance, str(socket), device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **env},
        )  # fmt: skip

    def wait_started(self) -> None:
        self.receive()

    def send(self, method: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `receive` reports that the process has ended
            self._process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        reply = json.loads(self._process.stdout.readline() or "{}")
        if "result" not in reply:
            raise RoleError(f"{self._role}: {reply.get('error', 'its process has ended')}")
        return reply["result"]

    def call(self, method: str, **arguments: Any) -> Any:
        self.send(method, **arguments)
        return self.receive()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(END_TIMEOUT_S)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()


class LocalRole:
    """A role in this process, whose calls are done when they are sent."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._results: deque[Any] = deque()

    def wait_started(self) -> None:
        pass

    def send(self, method: str, **arguments: Any) -> None:
        self._results.append(answer(self._role, method, arguments))

    def receive(self) -> Any:
        return self._results.popleft()

    def call(self, method: str, **arguments: Any) -> Any:
        self.send(method, **arguments)
        return self.receive()

    def kill(self) -> None:
        raise NotImplementedError("a role in this process cannot be killed")

    def close(self) -> None:
        self._role.close()
