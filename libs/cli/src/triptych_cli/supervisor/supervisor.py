"""Brings a topology up in order, keeps it up, takes it down in the opposite order."""

import asyncio
import fcntl
import os
import shutil
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from triptych_cli.roles import Bounds
from triptych_cli.supervisor.process import end_sessions, is_same_session
from triptych_cli.supervisor.rotating_log import RotatingLog, shift_logs
from triptych_cli.supervisor.service import Service
from triptych_cli.supervisor.state import (
    RUNNING,
    STANDS_BY,
    HostStatus,
    ServiceState,
    SystemStatus,
    read_status,
)
from triptych_cli.system.layout import MAX_SOCKET_PATH_BYTES, SUPERVISOR, RunLayout
from triptych_cli.system.resolved_options import ResolvedOptions
from triptych_cli.system.topology import HttpReady, ServiceSpec, Topology
from triptych_common.protocol.urls import base_url
from triptych_common.runtime import ensure_run_dir

LEFTOVERS_GRACE_S = 20.0
ENDED = frozenset({ServiceState.STOPPING, ServiceState.STOPPED})

OnChange = Callable[[SystemStatus], None]


class AlreadyRunningError(Exception):
    """Another supervisor holds the run directory."""


class ScalingFailedError(Exception):
    """A stage does not have the number of instances that was asked for."""


@dataclass(frozen=True, slots=True)
class StageState:
    """Instances of one stage."""

    num_present: int  # that run or start
    num_ready: int
    start_s: float  # seconds that the start of one took, at most; 0: none was started
    has_failed_start: bool


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
        self._env, self._cwd = env, cwd
        self._bounds = dict(topology.bounds)
        self._group: asyncio.TaskGroup | None = None  # while it runs
        self.commands = asyncio.Lock()  # held while a command of the user restarts, stops or scales services
        self._gpu_turns: dict[str, asyncio.Lock] = {}
        self._services = {
            spec.name: self._service(spec, stands_by=spec.stands_by) for spec in topology.services
        }

    def _service(self, spec: ServiceSpec, *, stands_by: bool = False) -> Service:
        return Service(
            spec,
            env={**spec.env_defaults, **self._env, **spec.env},
            cwd=self._cwd,
            log_output=RotatingLog(self._layout.log_file(spec.name), self._layout.log_max_bytes),
            on_change=self._report,
            start_turns=[self._gpu_turns.setdefault(gpu, asyncio.Lock()) for gpu in sorted(spec.gpus)],
            stands_by=stands_by,
        )

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
            self._group = group
            for service in self._services.values():
                if not service.spec.stands_by:
                    self._keep_running(service, group)
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

    def _keep_running(self, service: Service, group: asyncio.TaskGroup) -> None:
        awaited = (self._services[name] for name in sorted(service.spec.after | service.spec.starts_after))
        dependencies = [each for each in awaited if each.status.state is not ServiceState.STOPPED]
        group.create_task(service.keep_running(dependencies))

    # ---- stages ------------------------------------------------------------------------------------
    def bounds_of(self, stage: str) -> Bounds:
        """Return the bounds of a stage; none of it is planned: 0."""
        return self._bounds.get(stage, Bounds(0, 0))

    def gateway_metrics_urls(self) -> list[str]:
        """Return the URLs of the metrics of all gateways here."""
        return [
            f"{base_url(spec.metrics_host, spec.metrics_port)}/metrics"
            for spec in self._topology.services
            if isinstance(spec.ready, HttpReady) and spec.metrics_port is not None and not spec.stage
        ]

    def stage_state(self, stage: str) -> StageState:
        """Return the present state of a stage."""
        services = self._stage(stage)
        present = [each for each in services if each.status.state not in ENDED]
        ready = [each for each in present if each.status.state in RUNNING]
        return StageState(
            num_present=len(present),
            num_ready=len(ready),
            start_s=max((each.start_s for each in services), default=0.0),
            has_failed_start=any(each.start_failure is not None for each in services),
        )

    def scale_to(self, stage: str, number: int) -> list[tuple[Service, bool]]:
        """Start or stop instances of a stage, and return those changed, with whether each starts.

        Returns at once; the last ones by number end, after what they have in hand.
        """
        services, group = self._stage(stage), self._group
        if group is None or self.is_stopping:
            return []
        present = [each for each in services if each.status.state not in ENDED]
        stopped = [each for each in services if each.status.state is ServiceState.STOPPED]
        changed: list[tuple[Service, bool]] = []
        for before in stopped[: max(0, number - len(present))]:
            service = self._services[before.spec.name] = self._service(before.spec)
            self._keep_running(service, group)
            changed.append((service, True))
        for service in present[number:]:
            group.create_task(service.stop(STANDS_BY))
            changed.append((service, False))
        if changed:
            self._report()
        return changed

    async def scale_stage(self, stage: str, bounds: Bounds) -> AsyncGenerator[tuple[str, bool], None]:
        """Set the bounds of a stage, start or stop instances to keep to them, and wait for these.

        Yields:
            The name of each instance that is started or stopped, with whether it starts.

        Raises:
            ScalingFailedError: no such stage is planned, fewer are planned, or one did not start.
        """
        planned = len(self._stage(stage))
        if bounds.high > planned:
            option = stage.replace("_", "-")
            raise ScalingFailedError(
                f"{planned} of {stage} are planned: start the system with --{option}s {bounds.low}.."
                f"{max(bounds.high, 1)}"
            )
        self._bounds[stage] = bounds
        changed = self.scale_to(stage, bounds.clamp(self.stage_state(stage).num_present))
        for service, starts in changed:
            yield service.spec.name, starts
        for service, starts in changed:
            await self._wait_changed(service, starts=starts)

    async def _wait_changed(self, service: Service, *, starts: bool) -> None:
        while not (service.ready.is_set() if starts else service.status.state is ServiceState.STOPPED):
            if service.start_failure is not None:
                raise ScalingFailedError(f"{service.start_failure}: {service.start_failure.log_file}")
            if starts and service.status.state is ServiceState.STOPPED:
                raise ScalingFailedError(f"{service.spec.name} was stopped")
            self._changed.clear()
            await self._changed.wait()

    def _stage(self, stage: str) -> list[Service]:
        return [each for each in self._services.values() if each.spec.stage == stage]

    # ---- commands ----------------------------------------------------------------------------------
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
        first = [each for each in self._services.values() if not each.spec.stands_by]
        while not all(service.ready.is_set() for service in first):
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
