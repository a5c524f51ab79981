"""Asks the server for a process, and waits for its end."""

import atexit
import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.support.real.warm.messages import MAX_REQUEST_BYTES, Ended, Forked, Request
from tests.support.real.warm.preload import ENGINES, ENVIRONMENT, LIGHT

ROOT = Path(__file__).resolve().parents[4]
END_LIMIT_S = 10.0


class ForkedProcess:
    """As much of `subprocess.Popen` as is used of it."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    def fileno(self) -> int:
        """Readable when the process has ended."""
        return self._connection.fileno()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self._take_end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self._take_end()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _take_end(self) -> None:
        raw = self._connection.recv(65536)
        self.returncode = Ended.model_validate_json(raw).exit_code if raw else -signal.SIGKILL
        self._connection.close()


def fork(
    server: str,
    command: Sequence[str],
    *,
    output: IO[bytes] | int,
    errors: IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str],
    cwd: Path,
    ends_with_caller: bool = False,
) -> ForkedProcess | None:
    """`python -m MODULE …` as a fork of the server. None: it is to be started the real way.

    Args:
        errors: the same as `output`, if not given.
        pass_fds: further descriptors, which keep their numbers.
        ends_with_caller: it gets SIGTERM when this process has ended.
    """
    if command[0] != sys.executable or command[1] != "-m" or command[2] not in LIGHT | ENGINES:
        return None
    with contextlib.ExitStack() as stack:
        nothing = stack.enter_context(Path(os.devnull).open())
        given = {0: nothing.fileno(), 1: _descriptor(output), 2: _descriptor(errors or output)}
        given |= {each: each for each in pass_fds}
        request = Request(
            server=server, module=command[2], arguments=list(command[3:]), environment=dict(environment),
            cwd=str(cwd), numbers=list(given), ends_with_caller=ends_with_caller,
        )  # fmt: skip
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.callback(connection.close)
        connection.connect(server)
        socket.send_fds(connection, [request.model_dump_json().encode()], list(given.values()))
        answer = Forked.model_validate_json(connection.recv(MAX_REQUEST_BYTES))
        if answer.pid is None:
            print(f"{command[2]} is not forked, for it has its own {answer.differing}", file=sys.stderr)
            return None
        stack.pop_all()
    nothing.close()
    return ForkedProcess(answer.pid, connection)


def _descriptor(output: IO[bytes] | int) -> int:
    return output if isinstance(output, int) else output.fileno()


def run(
    command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float
) -> "subprocess.CompletedProcess[str]":
    """As `subprocess.run`, forked where that is possible."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start(command, environment=environment, output=output, errors=errors)
        code = process.wait(timeout_s)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(command, code, *texts)


def start(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: IO[bytes],
    errors: IO[bytes] | None = None,
    is_forked: bool = True,
) -> "ForkedProcess | subprocess.Popen[bytes]":
    """In a session of its own; forked where that is possible, and unless `is_forked` is false."""
    if is_forked:
        forked = fork(
            server(), command, output=output, errors=errors, environment=environment, cwd=Path.cwd()
        )
        if forked is not None:
            return forked
    return subprocess.Popen(
        command, env=dict(environment), stdout=output, stderr=errors or output, start_new_session=True
    )


@functools.cache
def server() -> str:
    """Path of the server's socket. It runs until this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="triptych-warm-")
    path = f"{folder.name}/server.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(16)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.real.warm.server", str(listener.fileno())],
            stdin=subprocess.PIPE, pass_fds=[listener.fileno()], cwd=ROOT,
            env={**ENVIRONMENT, **os.environ}, start_new_session=True,
        )  # fmt: skip

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        folder.cleanup()

    atexit.register(end)
    return path
