"""The supervisor with real processes (fake services): order, readiness, restarts, a clean end."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from triptych_cli.roles import Bounds
from triptych_cli.supervisor import daemon
from triptych_cli.supervisor import service as service_module
from triptych_cli.supervisor import supervisor as supervisor_module
from triptych_cli.supervisor.autoscaler import ScalingRules
from triptych_cli.supervisor.launch import Launch
from triptych_cli.supervisor.process import ChildProcess, session_members
from triptych_cli.supervisor.readiness import Probe, probe_for
from triptych_cli.supervisor.service import StartFailedError
from triptych_cli.supervisor.state import ServiceState, SystemStatus, read_status
from triptych_cli.supervisor.supervisor import (
    AlreadyRunningError,
    OnChange,
    Supervisor,
    is_supervised,
    run_directory,
)
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.machine import free_ports
from triptych_cli.system.resolved_options import ResolvedOptions
from triptych_cli.system.topology import HttpReady, Readiness, ServiceSpec, Topology
from triptych_common.runtime import RunDirError

SUPERVISED = Path(__file__).parent / "supervised.py"
FAKE_SERVICE = Path(__file__).parent / "fake_service.py"
OPTIONS = ResolvedOptions(model="m", model_is_local=False, gateway_port=1)
LIMIT_S = 60.0


@pytest.fixture
def layout(tmp_path: Path) -> Iterator[RunLayout]:
    with tempfile.TemporaryDirectory(prefix="tt-") as short:  # sockets need short paths
        yield RunLayout(Path(short) / "run", tmp_path / "state")


def fake(name: str, *words: str, after: frozenset[str] = frozenset(), **changes: float) -> ServiceSpec:
    port = free_ports(1)[0]
    spec = ServiceSpec(
        name=name,
        argv=(sys.executable, "-S", str(FAKE_SERVICE), str(port), *words),
        ready=HttpReady(f"http://127.0.0.1:{port}/"),
        after=after,
        start_timeout_s=10.0,
        stop_timeout_s=5.0,
    )
    return replace(spec, **changes)


class Watched:
    """A supervisor whose every report is kept."""

    def __init__(
        self, layout: RunLayout, *services: ServiceSpec, bounds: Mapping[str, Bounds] | None = None
    ) -> None:
        self.reports: list[SystemStatus] = []
        self._changed = asyncio.Event()
        self.supervisor = Supervisor(
            Topology(services, "http://x/v1", bounds=bounds or {}),
            layout,
            OPTIONS,
            env=dict(os.environ),
            cwd=layout.state_dir,
            on_change=self._keep,
        )

    def _keep(self, status: SystemStatus) -> None:
        self.reports.append(status)
        self._changed.set()

    def states(self, name: str) -> list[ServiceState]:
        """Without repetitions."""
        found: list[ServiceState] = []
        for report in self.reports:
            state = next(service.state for service in report.services if service.name == name)
            if not found or found[-1] is not state:
                found.append(state)
        return found

    def pid(self, name: str) -> int:
        pid = next(s.pid for s in self.supervisor.status().services if s.name == name)
        assert pid is not None
        return pid

    async def until(self, condition: Callable[[SystemStatus], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition(self.supervisor.status()):
                self._changed.clear()
                await self._changed.wait()


async def test_services_start_when_what_they_need_is_ready_and_stop_the_other_way(layout: RunLayout) -> None:
    with run_directory(layout):
        watched = Watched(layout, fake("low"), fake("high", after=frozenset({"low"})))
        async with watched.supervisor.running():
            pids = [watched.pid("low"), watched.pid("high")]
            for report in watched.reports:
                low, high = report.services
                if high.state is ServiceState.STARTING:
                    assert low.state is ServiceState.READY
        for report in watched.reports:
            low, high = report.services
            if low.state is ServiceState.STOPPING:
                assert high.state is ServiceState.STOPPED
        assert all(not session_members(pid) for pid in pids)
    assert not layout.run_dir.exists()


async def test_engines_of_one_gpu_start_one_behind_the_other(layout: RunLayout) -> None:
    """Each measures its free memory; also after a fault that ended both."""
    names = ("one", "other")
    with run_directory(layout):
        watched = Watched(layout, *(replace(fake(name), gpus=("0", "1")) for name in names))
        async with watched.supervisor.running():
            for name in names:
                os.kill(watched.pid(name), signal.SIGKILL)
            await watched.until(lambda s: all(e.num_restarts == 1 and e.state == "ready" for e in s.services))
        for report in watched.reports:
            assert {each.state for each in report.services} != {ServiceState.STARTING}


async def test_a_service_that_dies_is_started_again(layout: RunLayout) -> None:
    with run_directory(layout):
        watched = Watched(layout, fake("one"))
        async with watched.supervisor.running():
            first = watched.pid("one")
            os.kill(first, signal.SIGKILL)
            await watched.until(lambda s: s.services[0].num_restarts == 1 and s.services[0].state == "ready")
            assert watched.pid("one") != first
            details = [report.services[0].detail for report in watched.reports]
            assert any("ended by signal 9" in detail for detail in details)


async def test_a_service_that_cannot_start_fails_the_system_and_the_rest_is_stopped(
    layout: RunLayout,
) -> None:
    with run_directory(layout):
        watched = Watched(layout, fake("good"), fake("bad", "--exit-at-once=7", after=frozenset({"good"})))
        with pytest.raises(StartFailedError, match="bad exited with code 7") as caught:
            async with watched.supervisor.running():
                pytest.fail("it is not running")
        assert caught.value.log_file.read_text() == "fake service: cannot go on\n"
        assert watched.states("good")[-1] is ServiceState.STOPPED
        assert [s.pid for s in watched.supervisor.status().services] == [None, None]


async def test_a_service_that_never_gets_ready_is_given_up(layout: RunLayout) -> None:
    with run_directory(layout):
        watched = Watched(layout, fake("slow", "--never-ready", start_timeout_s=1.0))
        with pytest.raises(StartFailedError, match=r"not ready after 1 s: .* answers 503"):
            async with watched.supervisor.running():
                pytest.fail("it is not running")


async def test_an_executable_that_is_not_there_fails_at_once(layout: RunLayout) -> None:
    with run_directory(layout):
        watched = Watched(layout, replace(fake("none"), argv=("/nowhere/program",)))
        with pytest.raises(StartFailedError, match="could not be started"):
            async with watched.supervisor.running():
                pytest.fail("it is not running")


async def test_what_a_service_started_ends_with_it(layout: RunLayout) -> None:
    with run_directory(layout):
        watched = Watched(layout, fake("parent", "--child"))
        async with watched.supervisor.running():
            session = watched.pid("parent")
            assert len(session_members(session)) == 2
        assert session_members(session) == []


async def test_what_a_service_started_does_not_survive_its_restart(layout: RunLayout) -> None:
    with run_directory(layout):
        watched = Watched(layout, fake("parent", "--child"))
        async with watched.supervisor.running():
            session = watched.pid("parent")
            os.kill(session, signal.SIGKILL)
            await watched.until(lambda s: s.services[0].num_restarts == 1 and s.services[0].state == "ready")
            assert session_members(session) == []


async def test_shared_memory_of_a_killed_service_is_removed(layout: RunLayout) -> None:
    with run_directory(layout):
        watched = Watched(
            layout,
            fake("mapper", "--shared-memory=tt-test-memory", "--ignore-sigterm", stop_timeout_s=0.2),
        )
        async with watched.supervisor.running():
            assert {"tt-test-memory", "sem.tt-test-memory"} <= set(os.listdir("/dev/shm"))
        assert not {"tt-test-memory", "sem.tt-test-memory"} & set(os.listdir("/dev/shm"))


async def test_shared_memory_of_a_service_that_was_killed_whole_is_removed(layout: RunLayout) -> None:
    """No process that could remove it is left. The next process uses the same name."""
    with run_directory(layout):
        watched = Watched(layout, fake("mapper", "--shared-memory=tt-test-whole"))
        async with watched.supervisor.running():
            for member in session_members(watched.pid("mapper")):
                member.kill()
            await watched.until(lambda s: s.services[0].num_restarts == 1 and s.services[0].state == "ready")
            assert "tt-test-whole" in os.listdir("/dev/shm")
        assert not {"tt-test-whole", "sem.tt-test-whole"} & set(os.listdir("/dev/shm"))


async def test_a_service_that_ignores_sigterm_is_killed_after_its_limit(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    stop_session = ChildProcess.stop_session

    async def stop(child: ChildProcess, limit_s: float) -> int:
        limits.append(limit_s)
        return await stop_session(child, limit_s)

    monkeypatch.setattr(ChildProcess, "stop_session", stop)
    with run_directory(layout):
        watched = Watched(layout, fake("busy", "--ignore-sigterm", stop_timeout_s=0.3))
        async with watched.supervisor.running():
            session, start = watched.pid("busy"), time.monotonic()
        assert session_members(session) == []
        assert limits[0] == 0.3
        assert time.monotonic() - start < 60.0


async def test_an_error_inside_comes_out_as_it_is_and_everything_is_stopped(layout: RunLayout) -> None:
    with run_directory(layout):
        watched = Watched(layout, fake("one"))
        sessions: list[int] = []

        async def run() -> None:
            async with watched.supervisor.running():
                sessions.append(watched.pid("one"))
                raise LookupError("inside")

        with pytest.raises(LookupError, match="inside"):
            await run()
        assert session_members(sessions[0]) == []


async def test_cancelled_while_starting_it_stops_what_had_started(layout: RunLayout) -> None:
    with run_directory(layout):
        watched = Watched(layout, fake("ready"), fake("slow", "--never-ready"))

        async def run() -> None:
            async with watched.supervisor.running():
                pytest.fail("it is not running")

        async with asyncio.TaskGroup() as group:
            task = group.create_task(run())
            await watched.until(lambda s: s.services[0].state == "ready" and s.services[1].pid is not None)
            sessions = [watched.pid("ready"), watched.pid("slow")]
            task.cancel()
        assert all(not session_members(session) for session in sessions)


@pytest.mark.parametrize("where", ["probe", "start"])
async def test_stopped_between_the_decision_to_start_and_the_start(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """`stop` knows of no child yet; none must outlive it."""
    at_work, go_on = asyncio.Event(), asyncio.Event()
    sessions: list[int] = []
    start = ChildProcess.start

    @asynccontextmanager
    async def slow_probe(readiness: Readiness) -> AsyncIterator[Probe]:
        if where == "probe":
            at_work.set()
            await go_on.wait()
        async with probe_for(readiness) as probe:
            yield probe

    async def slow_start(*args: Any, **kwargs: Any) -> ChildProcess:
        child = await start(*args, **kwargs)
        sessions.append(child.pid)
        at_work.set()
        await go_on.wait()
        return child

    monkeypatch.setattr(service_module, "probe_for", slow_probe)
    monkeypatch.setattr(ChildProcess, "start", slow_start)
    with run_directory(layout):
        watched = Watched(layout, fake("one"))

        async def give_up() -> None:
            await at_work.wait()
            asyncio.get_running_loop().call_later(0.1, go_on.set)
            raise LookupError("another one failed")

        monkeypatch.setattr(watched.supervisor, "_wait_until_ready", give_up)
        with pytest.raises(LookupError):
            async with asyncio.timeout(LIMIT_S), watched.supervisor.running():
                pytest.fail("it is not running")
        assert len(sessions) == (where == "start")
        assert all(not session_members(session) for session in sessions)
        assert watched.states("one")[-1] is ServiceState.STOPPED
        assert watched.supervisor.status().services[0].pid is None


async def test_kill_now_cuts_a_slow_stop_short(layout: RunLayout) -> None:
    with run_directory(layout):
        watched = Watched(layout, fake("busy", "--ignore-sigterm", stop_timeout_s=600.0))
        async with watched.supervisor.running():
            start = time.monotonic()
            asyncio.get_running_loop().call_later(0.2, watched.supervisor.kill_now)
        assert time.monotonic() - start < 60.0


def test_compiled_code_stays_for_its_user_alone(layout: RunLayout) -> None:
    with run_directory(layout):
        (layout.compiled_dir / "kernel.so").touch()
        assert layout.compiled_dir.stat().st_mode & 0o777 == 0o700
    assert (layout.compiled_dir / "kernel.so").exists()
    layout.compiled_dir.chmod(0o777)
    with pytest.raises(RunDirError, match="compiled code"), run_directory(layout):
        pass


def test_one_supervisor_per_run_directory(layout: RunLayout) -> None:
    assert not is_supervised(layout)
    with run_directory(layout):
        assert is_supervised(layout)
        with pytest.raises(AlreadyRunningError), run_directory(layout):
            pass
        assert layout.run_dir.exists()
    assert not is_supervised(layout)


@contextmanager
def supervised(layout: RunLayout) -> Iterator[subprocess.Popen[str]]:
    """A supervisor in a process of its own, with a service that ignores SIGTERM and has a child; ready."""
    words = [str(layout.run_dir), str(layout.state_dir), str(free_ports(1)[0])]
    process = subprocess.Popen(
        [sys.executable, str(SUPERVISED), *words], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_what_a_killed_supervisor_left_is_cleared(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state file names the sessions; they are ended, and the directory can be used again."""
    monkeypatch.setattr(supervisor_module, "LEFTOVERS_GRACE_S", 0.3)
    with supervised(layout) as process:
        process.kill()
        process.wait()
    assert not is_supervised(layout)
    status = read_status(layout.state_file)
    assert status is not None
    session = status.services[0].pid
    assert session is not None
    assert len(session_members(session)) == 2
    assert daemon.stop_system(layout) == []
    assert session_members(session) == []
    assert not layout.run_dir.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything(layout: RunLayout, number: signal.Signals) -> None:
    with supervised(layout) as process:
        status = read_status(layout.state_file)
        assert status is not None
        session = status.services[0].pid
        assert session is not None
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 0
    assert session_members(session) == []
    assert not layout.run_dir.exists()


def test_down_ends_a_living_supervisor(layout: RunLayout) -> None:
    with supervised(layout) as process:
        assert daemon.stop_system(layout) == []
        assert process.wait(LIMIT_S) == 0


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / ("x" * 90), tmp_path / "state")
    with pytest.raises(ValueError, match="too long a path"), run_directory(layout):
        pass


async def test_a_full_run_directory_ends_nothing(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = fake("one")

    def supervisor(launch: Launch, on_change: OnChange) -> Supervisor:
        layout.state_file.with_suffix(".new").symlink_to("/dev/full")
        return Supervisor(
            Topology((spec,), "http://x/v1"),
            layout,
            OPTIONS,
            env=dict(os.environ),
            cwd=layout.state_dir,
            on_change=on_change,
        )

    monkeypatch.setattr(Launch, "supervisor", supervisor)
    reading, writing = os.pipe()
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = group.create_task(
            daemon.supervise(
                Launch(OPTIONS, layout), daemon.StartReportPipe(writing), ScalingRules(4.0, 60.0)
            )
        )
        progress = await asyncio.to_thread(lambda: list(daemon.read_reports(reading)))
        assert progress[-1].kind == "ready"
        assert read_status(layout.state_file) is None
        task.cancel()
    assert task.result() == 0
    assert not layout.run_dir.exists()
