"""`python -m tests.support.real.warm.server FD`: forks processes, until its standard input ends.

FD is the listening socket. A connection is one request: `Request` and the descriptors that its process gets;
answered by `Forked`, and, when the process has ended, by `Ended`. Whoever asks may have gone by then.
"""

import atexit
import contextlib
import fcntl
import gc
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tests.support.real.warm.messages import MAX_FDS, MAX_REQUEST_BYTES, Ended, Forked, Request
from tests.support.real.warm.preload import ENGINES, LAUNCHER, LIGHT, Preloaded

ABOVE = 200  # descriptors on their way to their numbers


class Server:
    """One thread, so that every fork has all there is."""

    def __init__(self, listener: socket.socket, preloaded: Preloaded) -> None:
        self._listener = listener
        self._preloaded = preloaded
        self._selector = selectors.DefaultSelector()
        self._callers: dict[int, socket.socket] = {}
        self._ending_with_caller: dict[int, int] = {}  # descriptor of the connection -> process
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._waking, False)
        os.set_blocking(self._woken, False)

    def serve(self) -> tuple[Request, list[int]] | None:
        """In a forked process: what it is to be, and its descriptors. None: no more is asked."""
        signal.set_wakeup_fd(self._waking)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for descriptor in (0, self._woken, self._listener):
            self._selector.register(descriptor, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._woken in ready:
                os.read(self._woken, 65536)
                self._report_ended()
            for each in ready:
                if isinstance(each, socket.socket) and each is not self._listener:
                    self._end_with_caller(each)
            if self._listener in ready:
                forked = self._answer(self._listener.accept()[0])
                if forked is not None:
                    return forked
            if 0 in ready:
                return None

    def _answer(self, caller: socket.socket) -> tuple[Request, list[int]] | None:
        raw, descriptors, _, _ = socket.recv_fds(caller, MAX_REQUEST_BYTES, MAX_FDS)
        request = Request.model_validate_json(raw)
        differing = self._preloaded.differing(request.module, request.environment)
        if self._preloaded.num_threads > 1:
            differing.append("threads")
        pid = None if differing else os.fork()
        if pid == 0:
            caller.close()
            self._leave()
            return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        caller.send(Forked(pid=pid, differing=differing).model_dump_json().encode())
        if pid is None:
            caller.close()
            return None
        self._callers[pid] = caller
        if request.ends_with_caller:
            self._ending_with_caller[caller.fileno()] = pid
            self._selector.register(caller, selectors.EVENT_READ)
        return None

    def _end_with_caller(self, caller: socket.socket) -> None:
        """It has gone, which is all that makes its connection readable."""
        self._selector.unregister(caller)
        pid = self._ending_with_caller.pop(caller.fileno())
        if pid in self._callers:
            os.kill(pid, signal.SIGTERM)

    def _report_ended(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            caller = self._callers.pop(pid)
            if self._ending_with_caller.pop(caller.fileno(), None) is not None:
                self._selector.unregister(caller)
            with contextlib.suppress(OSError):
                caller.send(Ended(exit_code=os.waitstatus_to_exitcode(status)).model_dump_json().encode())
            caller.close()

    def _leave(self) -> None:
        """In a forked process: nothing of the server's own stays open."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._listener.close()
        for caller in self._callers.values():
            caller.close()
        os.close(self._woken)
        os.close(self._waking)


def become(request: Request, descriptors: list[int], changes: Mapping[str, str]) -> None:
    """What `python -m` is when its imports are done. `changes`: what they have set in the environment."""
    os.setsid()
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, ABOVE) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(high, request.numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request.environment)
    if request.module not in LIGHT:
        os.environ.update(changes)
    os.chdir(request.cwd)
    sys.argv = [request.module, *request.arguments]
    sys.orig_argv = [sys.executable, "-m", request.module, *request.arguments]
    tempfile.tempdir = None
    random.seed()
    atexit.register(gc.freeze)  # no last collection: it would copy all pages
    if request.module == LAUNCHER:
        from tests.support.real.warm.patches import fork_services

        fork_services(request.server)
    if request.module in ENGINES:
        from tests.support.real.warm.engine_process import fork_engines

        fork_engines(request.module)


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    preloaded = Preloaded()
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy all pages
    forked = Server(listener, preloaded).serve()
    if forked is not None:
        become(*forked, preloaded.changes)
        try:
            runpy.run_module(forked[0].module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code
        else:
            code = None
        _exit(code)


def _exit(code: object) -> NoReturn:
    """Do what the interpreter does at its exit, except for taking apart every module."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threads: Any = threading
    threads._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())
    main()
