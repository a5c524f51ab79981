"""Supervises one service: start, readiness, restart with growing delays, stop. States: `state`."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from triptych_cli.supervisor.process import ChildProcess
from triptych_cli.supervisor.readiness import Probe, probe_for
from triptych_cli.supervisor.rotating_log import RotatingLog
from triptych_cli.supervisor.state import ALLOWED, RUNNING, STANDS_BY, LastEnd, ServiceState, ServiceStatus
from triptych_cli.system.topology import RedisAnswers, ServiceSpec, StoreAnswers
from triptych_common.domain.transitions import check_transition
from triptych_common.runtime.liveness import CHECK_INTERVAL_S, HangCount, StartLimit, activity_of
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

PROBE_INTERVAL_S = 0.1
FAILED_STOP_TIMEOUT_S = 5.0
UNRESPONSIVE_AFTER_CHECKS = 2  # a busy machine may be late with one heartbeat


class StartFailedError(Exception):
    """A service was not ready after its first start; a restart would only hide why."""

    def __init__(self, service: str, reason: str, log_file: Path) -> None:
        super().__init__(f"{service} {reason}")
        self.service, self.reason, self.log_file = service, reason, log_file


class RestartFailedError(Exception):
    """A service is not ready after a restart, for this reason; it is retried with growing delays."""


class Backoff:
    """Delays of 0.5, 1, 2, … 30 s; back to the first after `stable_s` in READY."""

    def __init__(self, first_s: float = 0.5, limit_s: float = 30.0, stable_s: float = 60.0) -> None:
        self._first_s, self._limit_s, self._stable_s = first_s, limit_s, stable_s
        self._next_s = first_s

    def next_delay_s(self, ready_s: float) -> float:
        """Delay after a process that was ready for `ready_s`."""
        if ready_s >= self._stable_s:
            self._next_s = self._first_s
        delay_s, self._next_s = self._next_s, min(self._next_s * 2, self._limit_s)
        return delay_s


class Service:
    """One `ServiceSpec` under supervision. `keep_running` is its task; `stop` ends that task."""

    def __init__(
        self,
        spec: ServiceSpec,
        *,
        env: Mapping[str, str],
        cwd: Path,
        log_output: RotatingLog,
        on_change: Callable[[], None],
        backoff: Backoff | None = None,
        start_turns: Sequence[asyncio.Lock] = (),
        stands_by: bool = False,
    ) -> None:
        """Store the parts; `start_turns` are held from a process' start until it is ready, or has ended."""
        self.spec = spec
        self.ready = asyncio.Event()  # set at the first readiness, never cleared
        self.start_failure: StartFailedError | None = None
        self._env, self._cwd, self._log_output = env, cwd, log_output
        self._on_change = on_change
        self._backoff = backoff or Backoff()
        self._start_turns = start_turns
        self.start_s = 0.0  # seconds from its process' start to readiness, the last time
        self._stopping = asyncio.Event()
        self._kills_at_once = False  # a process that starts from now on is killed at once
        self._at_rest = asyncio.Event()  # `keep_running` does not run: no process is left, none starts
        self._at_rest.set()
        self._child: ChildProcess | None = None
        self._restarted: asyncio.Future[None] | None = None  # resolved for `restart`
        self._restarts_child = False  # the next end of the child is a restart, without delay
        self.status = ServiceStatus(
            name=spec.name,
            state=ServiceState.STOPPED if stands_by else ServiceState.WAITING,
            detail=STANDS_BY if stands_by else "",
            since=time.time(),
            log_file=str(log_output.file),
            is_registered=not isinstance(spec.ready, RedisAnswers | StoreAnswers),
            metrics_port=spec.metrics_port,
            metrics_host=spec.metrics_host,
            stage=spec.stage,
        )

    async def keep_running(self, dependencies: Sequence["Service"]) -> None:
        """Run the service until `stop`, or until it fails to get ready the first time."""
        self._at_rest.clear()
        try:
            await self._run_until_stopped(dependencies)
        finally:
            self._at_rest.set()

    async def _run_until_stopped(self, dependencies: Sequence["Service"]) -> None:
        for dependency in dependencies:
            await first_of(dependency.ready, self._stopping)
        while not self._stopping.is_set():
            failure, ready_s = await self._run_once()
            if self._stopping.is_set():
                self._settle_restart("was stopped")
                return
            if self._restarts_child:
                self._restarts_child = False
                self._note_end("was restarted by a command")
                continue
            self._note_end(failure)
            self._settle_restart(failure)
            if not self.ready.is_set():
                self.start_failure = StartFailedError(self.spec.name, failure, self._log_output.file)
                self._move_to(ServiceState.STOPPED, failure)
                return
            delay_s = self._backoff.next_delay_s(ready_s)
            log.warning(
                "service ended, it is started again",
                name=self.spec.name, reason=failure, ready_s=round(ready_s, 1), delay_s=delay_s,
            )  # fmt: skip
            self._move_to(
                ServiceState.BACKOFF, f"{failure}; starts again after {delay_s:g} s", num_restarts=1
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()

    async def restart(self) -> None:
        """Stop the process within its stop limit, start it again, and return when it is ready.

        Raises:
            RestartFailedError: it was not ready before, or is not afterwards.
        """
        child = self._child
        if child is None or self.status.state not in RUNNING or self._restarted is not None:
            raise RestartFailedError(f"{self.spec.name} is {self.status.state}, not ready")
        self._restarted = asyncio.get_running_loop().create_future()
        self._restarts_child = True
        self._move_to(ServiceState.STOPPING, "restarts")
        try:
            await child.stop_session(self.spec.stop_timeout_s)
            await self._restarted  # bounded by the limits of the start
        finally:
            self._restarted = None

    def _settle_restart(self, failure: str = "") -> None:
        if self._restarted is None or self._restarted.done():
            return
        if failure:
            self._restarted.set_exception(RestartFailedError(f"{self.spec.name} {failure}"))
        else:
            self._restarted.set_result(None)

    async def stop(self, detail: str = "") -> None:
        """Send SIGTERM, then SIGKILL to the whole session, in limited time; `keep_running` has ended then.

        `detail` is shown for the stopped service.
        """
        self._stopping.set()
        if self._child is not None:
            # A service that is not ready has nothing to finish; an engine that loads ignores SIGTERM.
            is_starting = self.status.state is ServiceState.STARTING
            self._move_to(ServiceState.STOPPING)
            await self._child.stop_session(FAILED_STOP_TIMEOUT_S if is_starting else self.spec.stop_timeout_s)
        await self._at_rest.wait()  # a child that is starting just now is ended by `_run_once`
        self._child = None
        self._move_to(ServiceState.STOPPED, detail or self.status.detail)

    def kill_now(self) -> None:
        """Kill the session; a waiting `stop` ends at once."""
        self._stopping.set()
        self._kills_at_once = True
        if self._child is not None:
            self._child.kill_session()

    async def _run_once(self) -> tuple[str, float]:
        """Run one process to its end; returns the reason, and the seconds for which it was ready."""
        async with contextlib.AsyncExitStack() as turn:
            for each in self._start_turns:
                await self._take_turn(each, turn)
            return await self._run_in_turn(turn)

    async def _take_turn(self, start_turn: asyncio.Lock, turn: contextlib.AsyncExitStack) -> None:
        """Wait for the turn, which `turn` ends, or for `stop`."""
        async with asyncio.TaskGroup() as group:
            taking, stopping = (
                group.create_task(start_turn.acquire()),
                group.create_task(self._stopping.wait()),
            )
            await asyncio.wait({taking, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            taking.cancel()
        if not taking.cancelled():
            turn.callback(start_turn.release)

    async def _run_in_turn(self, turn: contextlib.AsyncExitStack) -> tuple[str, float]:
        async with probe_for(self.spec.ready) as probe:
            if self._stopping.is_set():
                return "", 0.0
            try:
                child = await ChildProcess.start(
                    self.spec.argv, env=self._env, cwd=self._cwd, log=self._log_output
                )
            except OSError as error:
                return f"could not be started: {error}", 0.0
            self._child = child
            if self._stopping.is_set():  # `stop` came during the start, when there was no child
                await child.stop_session(0.0 if self._kills_at_once else self.spec.stop_timeout_s)
                return "", 0.0
            self._move_to(ServiceState.STARTING)
            started_at = time.monotonic()
            failure = await self._until_ready(child, probe)
            ready_at = time.monotonic()
            if not failure and not self._stopping.is_set():
                self.start_s = ready_at - started_at
                child.record_shared_memory()
                self._move_to(ServiceState.READY)
                log.info("service ready", name=self.spec.name, pid=child.pid)
                self.ready.set()
                await turn.aclose()
                self._settle_restart()
                failure = await self._until_ended(child, probe)
        ready_s = time.monotonic() - ready_at
        if not self._stopping.is_set():
            await child.stop_session(FAILED_STOP_TIMEOUT_S)  # processes that it left, or itself if it hangs
            self._child = None
        return failure, ready_s

    async def _until_ready(self, child: ChildProcess, probe: Probe) -> str:
        """Wait for readiness; returns the failure, or "" when ready or on `stop`."""
        progress = StartLimit(self.spec.start_timeout_s, time.monotonic())
        while not self._stopping.is_set() and not await probe.is_met():
            now = time.monotonic()
            if progress.is_due(now):
                progress.note(now, child.activity())
            if progress.has_failed(now):
                return f"was not ready after {progress.elapsed_s(now):.0f} s: {probe.condition}"
            # The condition is in other processes and cannot be awaited; the end of the child can.
            if await child.ends_within(PROBE_INTERVAL_S):
                return _ended(await child.wait())
        return ""

    async def _until_ended(self, child: ChildProcess, probe: Probe) -> str:
        """Check that the service answers until its process ends or hangs; returns the reason."""
        hang_count, checked_at = HangCount(activity_of(child.pid)), time.monotonic()
        while not await child.ends_within(CHECK_INTERVAL_S):
            answers = await probe.answers()
            before, checked_at = checked_at, time.monotonic()
            if self.status.state not in RUNNING:  # it ends, and may have deregistered
                continue
            hang_count.count(answers, activity_of(child.pid), checked_at - before)
            if hang_count.is_hung:
                return f"hung: {probe.condition}, and used no CPU time in {hang_count.num_still} checks"
            self._show_answering(hang_count, probe.condition)
        return _ended(await child.wait())

    def _show_answering(self, hang_count: HangCount, condition: str) -> None:
        is_ready = self.status.state is ServiceState.READY
        if is_ready and hang_count.num_silent >= UNRESPONSIVE_AFTER_CHECKS:
            log.warning("service does not answer", name=self.spec.name, condition=condition)
            self._move_to(ServiceState.UNRESPONSIVE, condition)
        elif not is_ready and not hang_count.num_silent:
            log.info("service answers again", name=self.spec.name)
            self._move_to(ServiceState.READY)

    def _note_end(self, reason: str) -> None:
        """Keep the reason in the status; the next change of state reports it."""
        self.status = self.status.model_copy(update={"last_end": LastEnd(at=time.time(), reason=reason)})

    def _move_to(self, state: ServiceState, detail: str = "", *, num_restarts: int = 0) -> None:
        """Move to a state; nothing else assigns it.

        Raises:
            IllegalTransitionError: `state` cannot follow the present one.
        """
        check_transition(ALLOWED, self.spec.name, self.status.state, state)
        pid = self._child.pid if self._child else None
        self.status = self.status.model_copy(
            update={
                "state": state,
                "pid": pid,
                "pid_started_at": _started_at(pid) if pid else None,
                "num_restarts": self.status.num_restarts + num_restarts,
                "since": time.time(),
                "detail": detail,
            }
        )
        self._on_change()


async def first_of(*events: asyncio.Event) -> None:
    """Return when one of `events` is set."""
    async with asyncio.TaskGroup() as group:
        waits = [group.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


def _ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with code {returncode}"
    return f"was ended by signal {-returncode} ({signal.strsignal(-returncode)})"


def _started_at(pid: int) -> float | None:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None
