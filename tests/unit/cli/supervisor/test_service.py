"""A service's delays between restarts, and the steps of its states."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.waiting import until
from triptych_cli.supervisor.rotating_log import RotatingLog
from triptych_cli.supervisor.service import Backoff, Service
from triptych_cli.supervisor.state import ServiceState
from triptych_cli.system.topology import HttpReady, ServiceSpec


def test_delays_double_up_to_a_limit() -> None:
    backoff = Backoff(first_s=0.5, limit_s=4.0, stable_s=60.0)
    assert [backoff.next_delay_s(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, 4.0]


def test_a_long_good_run_starts_the_delays_over() -> None:
    backoff = Backoff(first_s=0.5, limit_s=4.0, stable_s=60.0)
    for _ in range(3):
        backoff.next_delay_s(1.0)
    assert backoff.next_delay_s(61.0) == 0.5


def make_service(
    changes: list[ServiceState], state: ServiceState | None = None, start_turns: Sequence[asyncio.Lock] = ()
) -> Service:
    """A service in `state` that reports each change of it to `changes`; no process is started."""
    spec = ServiceSpec("one", ("true",), HttpReady("http://x/"))
    service = Service(
        spec,
        env={},
        cwd=Path("/"),
        log_output=RotatingLog(Path("/one.log"), 1),
        on_change=lambda: changes.append(service.status.state),
        backoff=Backoff(first_s=0.0),
        start_turns=start_turns,
    )
    if state is not None:
        service.status = service.status.model_copy(update={"state": state})
    return service


class SlowChild:
    """In place of a process: its start and its end take until the test lets them go on."""

    def __init__(self, pid: int) -> None:
        self.pid, self.may_end, self.has_ended = pid, asyncio.Event(), asyncio.Event()

    async def ends_within(self, _limit_s: float) -> bool:
        await asyncio.sleep(0)
        return self.has_ended.is_set()

    async def wait(self) -> int:
        await self.has_ended.wait()
        return 1

    def record_shared_memory(self) -> None: ...

    async def stop_session(self, _limit_s: float) -> int:
        await self.may_end.wait()
        self.has_ended.set()
        return 0

    def kill_session(self) -> None:
        self.may_end.set()


async def test_a_kill_during_a_start_ends_in_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, may_start = asyncio.Event(), asyncio.Event()
    child = SlowChild(os.getpid())
    child.may_end.set()

    async def start(*_: object, **__: object) -> SlowChild:
        starts.set()
        await may_start.wait()
        return child

    monkeypatch.setattr("triptych_cli.supervisor.service.ChildProcess.start", start)
    service = make_service([])
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(service.keep_running([]))
        await starts.wait()
        service.kill_now()
        may_start.set()
        await child.has_ended.wait()
        await service.stop()
    assert service.status.state is ServiceState.STOPPED


async def test_a_kill_while_a_crash_is_cleaned_up_ends_in_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    child = SlowChild(os.getpid())
    cleans_up = asyncio.Event()

    async def start(*_: object, **__: object) -> SlowChild:
        return child

    async def stop_session(_limit_s: float) -> int:
        cleans_up.set()
        await child.may_end.wait()
        return 0

    async def is_met(_probe: object) -> bool:
        return True

    monkeypatch.setattr("triptych_cli.supervisor.service.ChildProcess.start", start)
    monkeypatch.setattr(child, "stop_session", stop_session)
    monkeypatch.setattr("triptych_cli.supervisor.readiness.HttpProbe.is_met", is_met)
    service = make_service([])
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(service.keep_running([]))
        await service.ready.wait()
        child.has_ended.set()  # it crashed
        await cleans_up.wait()
        service.kill_now()
        await asyncio.sleep(0)  # `_run_once` ends
        await service.stop()
    assert service.status.state is ServiceState.STOPPED


class TestTurns:
    """Two engines of one GPU: each measures its free memory while it starts."""

    @pytest.fixture
    def starts(self, monkeypatch: pytest.MonkeyPatch) -> "asyncio.Queue[SlowChild]":
        """Processes as they are started; each is ready when `is_ready` holds it."""
        started: asyncio.Queue[SlowChild] = asyncio.Queue()
        self.is_ready: set[SlowChild] = set()
        self.newest: SlowChild | None = None

        async def start(*_: object, **__: object) -> SlowChild:
            child = SlowChild(os.getpid())
            child.may_end.set()
            self.newest = child
            started.put_nowait(child)
            return child

        async def is_met(_probe: object) -> bool:
            return self.newest in self.is_ready

        async def answers(_probe: object) -> bool:
            return True

        monkeypatch.setattr("triptych_cli.supervisor.readiness.HttpProbe.answers", answers)
        monkeypatch.setattr("triptych_cli.supervisor.service.ChildProcess.start", start)
        monkeypatch.setattr("triptych_cli.supervisor.readiness.HttpProbe.is_met", is_met)
        return started

    async def test_engines_that_fell_together_start_one_behind_the_other(
        self, starts: "asyncio.Queue[SlowChild]"
    ) -> None:
        turn = asyncio.Lock()
        services = [make_service([], start_turns=[turn]) for _ in range(2)]
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            for service in services:
                tasks.create_task(service.keep_running([]))
            children = []
            for _ in services:
                children.append(await starts.get())
                assert starts.empty(), "the other one waits"
                self.is_ready.add(children[-1])
            await asyncio.gather(*(service.ready.wait() for service in services))
            for child in children:
                child.has_ended.set()  # one fault of the GPU ends both
            first = await starts.get()
            one_waits = {ServiceState.STARTING, ServiceState.BACKOFF}
            await until(lambda: {each.status.state for each in services} == one_waits)
            assert turn.locked()
            assert starts.empty()
            self.is_ready.add(first)
            second = await starts.get()
            self.is_ready.add(second)
            await until(lambda: {each.status.state for each in services} == {ServiceState.READY})
            assert not turn.locked()
            for service in services:
                await service.stop()

    async def test_an_engine_whose_start_fails_gives_its_turn_away(
        self, starts: "asyncio.Queue[SlowChild]"
    ) -> None:
        turn = asyncio.Lock()
        services = [make_service([], start_turns=[turn]) for _ in range(2)]
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            for service in services:
                tasks.create_task(service.keep_running([]))
            (await starts.get()).has_ended.set()
            self.is_ready.add(await starts.get())
            await services[1].ready.wait()
            await services[1].stop()

    async def test_a_stop_does_not_wait_for_the_turn(self, starts: "asyncio.Queue[SlowChild]") -> None:
        turn = asyncio.Lock()
        await turn.acquire()
        service = make_service([], start_turns=[turn])
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            tasks.create_task(service.keep_running([]))
            await asyncio.sleep(0)
            await service.stop()
        assert starts.empty()
        turn.release()
        assert not turn.locked()
