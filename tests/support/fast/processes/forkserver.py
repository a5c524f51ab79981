"""Service processes, forked from one server that has everything imported: started in milliseconds.

Each is a process of its own with the services' own `main`, so that signals mean what they mean.
"""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.fast.layout import kind_of
from tests.support.fast.processes import next_release, points
from tests.support.fast.processes.machine import HERE, Machine
from tests.support.protocol_steps import Party

PR_SET_PDEATHSIG = 1
STOP_TIMEOUT_S = 20.0
PRELOADED = [
    "tests.support.fast.processes.mains",
    "triptych_cache_store.__main__",
    "triptych_fabric.__main__",
    "triptych_gateway.__main__",
    "triptych_encoder.service",
    "triptych_vllm_connector.worker.writing",
    "httpcore",  # from here on: what others import when they are used first
    "pydantic.v1",
    "uvicorn.lifespan.off",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.auto",
    "uvloop",
]


@functools.cache
def _context() -> ForkServerContext:
    """The fork server, running, with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the server imports before it gets our path
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


_starting = threading.Lock()


@contextmanager
def _without_main() -> Iterator[None]:
    """A child otherwise runs the parent's main script first, and so imports whatever that imports."""
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class ServiceProcess:
    """One instance, started again and again under the same name."""

    def __init__(
        self, party: Party, name: str, arguments: Sequence[str], folder: Path, machine: Machine = HERE
    ) -> None:
        """`folder`: of the whole system."""
        self.party = party
        self.name = name
        self.is_next_release = False  # from its next start on
        self._machine = machine
        self._arguments = tuple(arguments)
        self._folder = folder
        self._process: BaseProcess | None = None
        self._looking = threading.Lock()  # an exit code can be read once; then the process knows it

    @property
    def kind(self) -> str:
        return kind_of(self.name)

    @property
    def log_path(self) -> Path:
        return self._folder / f"{self.name}.log"

    def start(self) -> None:
        process = _context().Process(
            target=_main,
            args=(self.party, self.name, self._arguments, self._folder, self.log_path, self._machine),
            kwargs={"is_next_release": self.is_next_release},
            name=self.name,
            daemon=True,
        )
        with _without_main():
            process.start()
        self._process = process

    @property
    def pid(self) -> int:
        if self._process is None or self._process.pid is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """Ready to be read when the process has ended."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process.sentinel

    @property
    def exit_code(self) -> int | None:
        with self._looking:
            return None if self._process is None else self._process.exitcode

    def send(self, number: signal.Signals) -> None:
        """To a process that has ended: nothing."""
        with self._looking:
            if self._process is not None and self._process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and wait for its end."""
        self.send(signal.SIGKILL)
        if not connection.wait([self.sentinel], STOP_TIMEOUT_S):
            raise RuntimeError(f"{self.name} survives SIGKILL")

    def end(self) -> int | None:
        """Ask it to end, make it end; the exit code."""
        if self._process is None:
            return None
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(STOP_TIMEOUT_S)
        return self._process.exitcode

    def rss_bytes(self) -> int:
        """Resident memory of its own and shared; 0 when it has ended."""
        try:
            fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        except OSError:
            return 0
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _main(
    party: Party,
    name: str,
    arguments: tuple[str, ...],
    folder: Path,
    log_path: Path,
    machine: Machine,
    *,
    is_next_release: bool,
) -> None:
    """In the forked process."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no test, no services
    with log_path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    machine.enter()
    if is_next_release:
        next_release.install()
    sys.argv = [name, *arguments]
    points.install(folder, name, party)
    from tests.support.fast.processes import mains as product_mains

    mains: dict[Party, Callable[[], None]] = product_mains.MAINS
    mains[party]()
