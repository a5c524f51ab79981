"""The supervisor with services that hang, and with slow ones; and what it keeps of their ends."""

import asyncio
import os
import signal

import pytest

from tests.integration.cli.test_supervisor import LIMIT_S, Watched, fake, layout
from triptych_cli.supervisor import readiness
from triptych_cli.supervisor import service as service_module
from triptych_cli.supervisor.process import session_members
from triptych_cli.supervisor.state import ServiceState
from triptych_cli.supervisor.supervisor import run_directory
from triptych_cli.system.layout import RunLayout
from triptych_common.runtime.liveness import HUNG_AFTER_CHECKS, Activity, HangCount

__all__ = ["layout"]  # the fixture


@pytest.fixture
def silent_checks(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[None]:
    """Checks of a running service follow each other at once; the queue gets those without an answer."""
    silent: asyncio.Queue[None] = asyncio.Queue()
    count = HangCount.count

    def counted(self: HangCount, answers: bool | None, activity: Activity, interval_s: float) -> None:
        count(self, answers, activity, interval_s)
        if self.num_silent:
            silent.put_nowait(None)

    monkeypatch.setattr(HangCount, "count", counted)
    monkeypatch.setattr(service_module, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(readiness, "CHECK_TIMEOUT_S", 0.3)
    return silent


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR1])
async def test_a_service_that_hangs_is_seen_and_started_again(
    layout: RunLayout, silent_checks: asyncio.Queue[None], number: signal.Signals
) -> None:
    with run_directory(layout):
        watched = Watched(layout, fake("one"))
        async with watched.supervisor.running():
            first = watched.pid("one")
            os.kill(first, number)
            await watched.until(lambda s: s.services[0].num_restarts == 1 and s.services[0].state == "ready")
            assert watched.pid("one") != first
            assert session_members(first) == []
            seen = watched.states("one")
            assert seen[seen.index(ServiceState.READY) :] == [
                ServiceState.READY,
                ServiceState.UNRESPONSIVE,
                ServiceState.BACKOFF,
                ServiceState.STARTING,
                ServiceState.READY,
            ]
            last_end = watched.supervisor.status().services[0].last_end
            assert last_end is not None
            assert "hung: " in last_end.reason


async def test_a_service_that_works_and_does_not_answer_is_left_to_work(
    layout: RunLayout, silent_checks: asyncio.Queue[None]
) -> None:
    with run_directory(layout):
        watched = Watched(layout, fake("one"))
        async with watched.supervisor.running():
            first = watched.pid("one")
            os.kill(first, signal.SIGUSR2)
            await watched.until(lambda s: s.services[0].state == "unresponsive")
            async with asyncio.timeout(LIMIT_S):
                for _ in range(3 * HUNG_AFTER_CHECKS):
                    await silent_checks.get()
            assert watched.pid("one") == first
            assert watched.supervisor.status().services[0].num_restarts == 0


async def test_a_service_that_was_stopped_for_a_moment_is_ready_again(
    layout: RunLayout, silent_checks: asyncio.Queue[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HangCount, "is_hung", False)
    with run_directory(layout):
        watched = Watched(layout, fake("one"))
        async with watched.supervisor.running():
            os.kill(watched.pid("one"), signal.SIGSTOP)
            await watched.until(lambda s: s.services[0].state == "unresponsive")
            os.kill(watched.pid("one"), signal.SIGCONT)
            await watched.until(lambda s: s.services[0].state == "ready")
            assert watched.supervisor.status().services[0].num_restarts == 0


async def test_the_last_end_of_a_service_outlives_its_restart_and_is_logged(
    layout: RunLayout, caplog: pytest.LogCaptureFixture
) -> None:
    with run_directory(layout):
        watched = Watched(layout, fake("one"))
        async with watched.supervisor.running():
            assert watched.supervisor.status().services[0].last_end is None
            os.kill(watched.pid("one"), signal.SIGKILL)
            await watched.until(lambda s: s.services[0].num_restarts == 1 and s.services[0].state == "ready")
            service = watched.supervisor.status().services[0]
            assert service.detail == ""
            assert service.last_end is not None
            assert service.last_end.reason == "was ended by signal 9 (Killed)"
            texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
            assert texts == ["service ended, it is started again"]
            async for _ in watched.supervisor.restart_services(["one"]):
                pass
            service = watched.supervisor.status().services[0]
            assert service.last_end is not None
            assert service.last_end.reason == "was restarted by a command"
