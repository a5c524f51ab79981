"""EngineCore on the CPU: forked from a process that has imported torch and vLLM, instead of spawned.

vLLM spawns EngineCore there: a new interpreter imports all of it again, a third of an engine's start. Here
the host imports what both need while it has one thread, and forks a fork server, which is multiprocessing's:

    host: imports ──fork──▶ fork server ──fork, when vLLM starts the engine──▶ EngineCore

What spawning would do is done: EngineCore gets the host's environment and priority of that moment, and its
exit functions run. Workers of several ranks are spawned by EngineCore, as before.
"""

import atexit
import os
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.process_exit import end_with_parent
from triptych_vllm_connector.seams.replacing import replace

log = get_logger(__name__)

MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "triptych_vllm_connector.connector",
)
"""Modules of EngineCore on the CPU; a model's own are imported by the host and by EngineCore alike."""
_LAST_PYTHON = (3, 13)  # a fork server of 3.14 wants a key from its clients


def fork_engine() -> bool:
    """Import what EngineCore needs, and have vLLM fork it from now on; return False if it spawns it.

    Call it once, before the host starts any thread.
    """
    import torch

    if torch.version.cuda is not None and torch.cuda.is_available():
        return False  # CUDA may be in use here, and does not outlive a fork: vLLM spawns (`process_start`)
    for module in MODULES:
        import_module(module)
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads > 1 or sys.version_info[:2] > _LAST_PYTHON:
        log.info("engine is spawned, not forked", num_threads=num_threads)
        return False
    _start_server()
    engine_utils: Any = import_module("vllm.v1.engine.utils")
    users = (engine_utils.CoreEngineProcManager.__init__,)
    replace(engine_utils, "get_mp_context", _Context, used_by=users, everywhere=False)
    return True


def _start_server() -> None:
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    reading, writing = os.pipe()  # the server ends when the host's end is closed
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            end_with_parent()  # else it lives as long as EngineCore, and that one as long as it
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
        """Run the process, and its exit functions, as a spawned one does."""
        try:
            super().run()
        finally:
            atexit._run_exitfuncs()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[dict[str, str], int], dict[str, Any]]:
        environment = dict(os.environ)  # noqa: TID251 -- handed on, not read
        priority = os.getpriority(os.PRIO_PROCESS, 0)
        return _within, (environment, priority), self.__dict__


class _Context(ForkServerContext):
    Process = _Process


def _within(environment: dict[str, str], priority: int) -> _Process:
    """Return the process, in its own interpreter, before its arguments are read."""
    os.environ.clear()  # noqa: TID251 -- set, not read
    os.environ.update(environment)  # noqa: TID251
    os.setpriority(os.PRIO_PROCESS, 0, max(priority, os.getpriority(os.PRIO_PROCESS, 0)))
    return _Process.__new__(_Process)
