"""Brings a topology up in order, keeps it up, takes it down in the opposite order."""

import asyncio
import fcntl
import os
import shutil
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from triptych_cli.supervisor.process import end_sessions, is_same_session
from triptych_cli.supervisor.rotating_log import RotatingLog, shift_logs
from triptych_cli.supervisor.service import Service
from triptych_cli.supervisor.state import HostStatus, SystemStatus, read_status
from triptych_cli.system.layout import MAX_SOCKET_PATH_BYTES, SUPERVISOR, RunLayout
from triptych_cli.system.resolved_options import ResolvedOptions
from triptych_cli.system.topology import Topology
from triptych_common.runtime import ensure_run_dir

LEFTOVERS_GRACE_S = 20.0

OnChange = Callable[[SystemStatus], None]


class AlreadyRunningError(Exception):
    """Another supervisor holds the run directory."""


class Supervisor:
    """One system on this machine; all its processes have ended when `running` is left."""

    def __init__(
        self,
        topology: Topology,
        layout: RunLayout,
        options: ResolvedOptions,
        *,
        env: Mapping[str, str],
        cwd: Path,
        on_change: OnChange,
    ) -> None:
        self._topology, self._layout, self._options = topology, layout, options
        self._on_change = on_change
        self._changed = asyncio.Event()
        self.is_stopping = False
        self._services = {
            spec.name: Service(
                spec,
                env={**spec.env_defaults, **env, **spec.env},
                cwd=cwd,
                log_output=RotatingLog(layout.log_file(spec.name), layout.log_max_bytes),
                on_change=self._report,
            )
            for spec in topology.services
        }

    @property
    def endpoint(self) -> str:
        return self._topology.endpoint

    def status(self) -> SystemStatus:
        return SystemStatus(
            supervisor_pid=os.getpid(),
            endpoint=self._topology.endpoint,
            redis_url=self._topology.redis_url,
            deployment=self._options.deployment,
            store_socket=str(self._layout.store_socket),
            traces_dir=str(self._layout.traces_dir),
            model=self._options.model,
            host=self._host_status(),
            services=tuple(service.status for service in self._services.values()),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start all services, yield when they are ready, and stop them afterwards, dependents first.

        Raises:
            StartFailedError: a service did not get ready; what had been started is stopped again.
        """
        failure: Exception | None = None
        async with asyncio.TaskGroup() as group:
            for service in self._services.values():
                awaited = service.spec.after | service.spec.starts_after
                dependencies = [self._services[name] for name in sorted(awaited)]
                group.create_task(service.keep_running(dependencies))
            # Inside the group: `stop` ends the tasks; none is cancelled between fork and record.
            try:
                await self._wait_until_ready()
                yield
            except Exception as error:  # raised outside of the group, which would wrap it
                failure = error
            finally:
                await self._stop()
        if failure is not None:
            raise failure

    async def restart_services(self, names: Collection[str]) -> AsyncGenerator[str, None]:
        """Restart services one after the other, dependencies first, each when the one before is ready.

        Yields:
            The name of each before it is restarted.

        Raises:
            RestartFailedError: one is not ready again; the others were left alone.
        """
        for name, service in self._services.items():
            if name in names:
                yield name
                await service.restart()

    async def stop_services(self, names: Collection[str]) -> AsyncGenerator[str, None]:
        """Stop services for good, dependents before their dependencies; the others continue.

        Yields:
            The name of each before it is stopped; those that may end together, one after the other.
        """
        for wave in self._topology.stop_waves():
            chosen = [spec.name for spec in wave if spec.name in names]
            for name in chosen:
                yield name
            async with asyncio.TaskGroup() as group:
                for name in chosen:
                    group.create_task(self._services[name].stop())

    def kill_now(self) -> None:
        """End everything at once, without grace."""
        for service in self._services.values():
            service.kill_now()

    async def _wait_until_ready(self) -> None:
        while not all(service.ready.is_set() for service in self._services.values()):
            for service in self._services.values():
                if service.start_failure is not None:
                    raise service.start_failure
            self._changed.clear()
            await self._changed.wait()  # each start is bounded by its own time limit

    async def _stop(self) -> None:
        self.is_stopping = True
        for wave in self._topology.stop_waves():
            async with asyncio.TaskGroup() as group:
                for spec in wave:
                    group.create_task(self._services[spec.name].stop())

    def _host_status(self) -> HostStatus | None:
        host = self._options.host
        if host is None:
            return None
        return HostStatus(
            name=host.name,
            store=host.store,
            agent=host.agent,
            join_dir=str(self._layout.join_dir),
            key_file=str(host.key_file) if host.key_file else None,
            runs_redis=host.redis_port is not None,
        )

    def _report(self) -> None:
        self._changed.set()
        self._on_change(self.status())


@contextmanager
def ended_by_signals(supervisor: Supervisor) -> Iterator[None]:
    """Cancel the current task on SIGINT, SIGTERM or SIGHUP, which leaves `running`; a second signal kills.

    Main thread only.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    was_signalled = False

    def on_signal() -> None:
        nonlocal was_signalled
        if was_signalled or supervisor.is_stopping:
            supervisor.kill_now()
        elif task is not None:
            was_signalled = True
            task.cancel()

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextmanager
def run_directory(layout: RunLayout) -> Iterator[None]:
    """Lock the run directory for the block and remove it afterwards; the logs' folder stays.

    Processes, sockets and the region of a killed supervisor are cleared first.

    Raises:
        AlreadyRunningError: another supervisor runs in it.
        RunDirError: it cannot be made, or is open to others.
        ValueError: its path is too long for sockets.
    """
    longest = max(len(os.fsencode(path)) for path in (layout.redis_socket, layout.tmp_dir / ("0" * 36)))
    if longest > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"{layout.run_dir} is too long a path for sockets; name a shorter one: TRIPTYCH_RUN_DIR "
            "(demo makes one of its own beside it)"
        )
    ensure_run_dir(layout.run_dir)
    with layout.lock_file.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunningError(
                f"a system is running already (run directory {layout.run_dir})"
            ) from None
        if os.fstat(lock.fileno()).st_nlink == 0:
            raise AlreadyRunningError("a system is being stopped here just now; try again")
        clear_leftovers(layout)
        layout.tmp_dir.mkdir(mode=0o700)
        for folder in (layout.logs_dir, layout.traces_dir):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ensure_run_dir(layout.compiled_dir, "folder of compiled code")  # engines load code from it
        for file in layout.logs_dir.glob("*.log"):
            if file != layout.log_file(SUPERVISOR):  # the caller's own, which it writes already
                shift_logs(file)
        try:
            yield
        finally:
            shutil.rmtree(layout.run_dir, ignore_errors=True)


def is_supervised(layout: RunLayout) -> bool:
    """True if a supervisor runs in the run directory."""
    try:
        with layout.lock_file.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def clear_leftovers(layout: RunLayout) -> int:
    """End a killed supervisor's processes and remove its files; returns the number of processes."""
    status = read_status(layout.state_file)
    sessions = [
        service.pid
        for service in (status.services if status else ())
        if service.pid is not None and is_same_session(service.pid, service.pid_started_at)
    ]
    num_killed = end_sessions(sessions, LEFTOVERS_GRACE_S)
    for left in layout.run_dir.iterdir():
        if left == layout.lock_file:
            continue
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)
    return num_killed
