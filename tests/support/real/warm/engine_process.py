"""In a forked service: what it would spawn is forked from this process, as it is now.

The fork server is multiprocessing's own, itself a fork: a member of the service's session and a child of the
service, as EngineCore is. A spawned process inherits the environment of the one that spawns it, and so does
this one.
"""

import atexit
import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any


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
