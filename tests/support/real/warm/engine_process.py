"""In a forked service: EngineCore and the compile server are forked from this process, as it is now.

The fork server is multiprocessing's own, itself a fork: a member of the service's session and a child of the
service, as EngineCore is. A spawned process inherits the environment of the one that spawns it, and so does
this one.
"""

import asyncio
import atexit
import json
import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import SimpleNamespace
from typing import Any

from triptych_vllm_connector.grammars import compile_server, compiler


def fork_engines() -> None:
    """From now on, in this process."""
    get_context = multiprocessing.get_context
    names: Any = multiprocessing
    names.get_context = lambda method=None: _Context() if method == "spawn" else get_context(method)
    connections: Any = connection
    address = connections.arbitrary_address("AF_UNIX")
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            names.get_context = get_context  # workers of several ranks are spawned
            try:
                forkserver.main(listener.detach(), reading, [])
            finally:
                os._exit(0)
    os.close(reading)
    server: Any = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd = address, writing
    server._forkserver_pid = pid
    module: Any = compiler
    module.asyncio = SimpleNamespace(**{**vars(asyncio), "create_subprocess_exec": _create_compile_server})


class _Process(ForkServerProcess):
    def run(self) -> None:
        """As a spawned process: what is to be done at its exit is done."""
        try:
            super().run()
        finally:
            atexit._run_exitfuncs()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[dict[str, str]], dict[str, Any]]:
        return _within, (dict(os.environ),), self.__dict__


class _Context(ForkServerContext):
    Process = _Process


def _within(environment: dict[str, str]) -> _Process:
    """In the new process, before its arguments are read."""
    os.environ.clear()
    os.environ.update(environment)
    return _Process.__new__(_Process)


# ---- the compile server ----------------------------------------------------------------------------
async def _create_compile_server(*command: str, pass_fds: Sequence[int], **options: Any) -> "_CompileServer":
    control_fd, tokenizer_fd = pass_fds
    with socket.socket(fileno=os.dup(control_fd)) as control:
        tokenizer = f"/proc/{os.getpid()}/fd/{tokenizer_fd}"
        process = _Context().Process(target=_compile, args=(control, tokenizer, command[-1]))
        process.start()
    return _CompileServer(process)


def _compile(control: socket.socket, tokenizer: str, limits: str) -> None:
    tokenizer_fd = os.open(tokenizer, os.O_RDONLY)
    compile_server.main(control.detach(), tokenizer_fd, compile_server.CompileLimits(*json.loads(limits)))


class _CompileServer:
    """As much of `asyncio.subprocess.Process` as a `GrammarCompiler` uses."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid
        self.kill = process.kill

    async def wait(self) -> int:
        await asyncio.to_thread(self._process.join)
        return int(self._process.exitcode)
