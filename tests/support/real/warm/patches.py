"""In a forked launcher: its supervisor is forked too, and so are the services of that one."""

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from tests.support.real.warm.client import ForkedProcess, fork


def fork_services(server: str) -> None:
    """Fork the services that this process starts from now on, from the process behind `server`."""
    from triptych_cli.supervisor import daemon, process

    launcher: Any = daemon
    launcher.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": partial(_popen, server)})
    supervisor: Any = process
    start = partial(_create_subprocess_exec, server)
    supervisor.asyncio = SimpleNamespace(**{**vars(asyncio), "create_subprocess_exec": start})


def _popen(
    server: str,
    command: Sequence[str],
    *,
    stdout: IO[bytes] | int,
    pass_fds: Sequence[int],
    env: Mapping[str, str],
    cwd: Path,
    **options: Any,
) -> Any:
    forked = fork(server, command, output=stdout, pass_fds=pass_fds, environment=env, cwd=cwd)
    if forked is not None:
        return forked
    return subprocess.Popen(command, stdout=stdout, pass_fds=pass_fds, env=env, cwd=cwd, **options)


async def _create_subprocess_exec(
    server: str, *command: str, stdout: IO[bytes] | int, env: Mapping[str, str], cwd: Path, **options: Any
) -> Any:
    forked = fork(server, command, output=stdout, environment=env, cwd=cwd, ends_with_caller=True)
    if forked is not None:
        return _AsyncForkedProcess(forked)
    return await asyncio.create_subprocess_exec(*command, stdout=stdout, env=env, cwd=cwd, **options)


class _AsyncForkedProcess:
    """As much of `asyncio.subprocess.Process` as a supervisor uses."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process = process
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._descriptor = process.fileno()
        self._loop.add_reader(self._descriptor, self._note_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        await self._ended.wait()
        return self._process.wait()

    def terminate(self) -> None:
        self._process.terminate()

    def _note_end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._process.poll()
        self._ended.set()
