"""An engine hangs when it neither answers nor computes, or computes without an end."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.virtual_time import virtual_time
from triptych_common.domain.errors import TriptychError
from triptych_vllm_connector.host.engine_watchdog import (
    SPIN_FACTOR,
    EngineWatchdog,
    StallCheck,
    engine_cpu_seconds,
)

LIMIT_S = 60.0


class HangsError(TriptychError):
    """The engine hangs."""


class Engine:
    used_s = 0.0

    def __call__(self) -> float:
        return self.used_s


def test_an_engine_on_a_gpu_is_measured_by_the_clock() -> None:
    check = StallCheck(LIMIT_S, None)
    check.start()
    assert check.is_stalled()


@pytest.mark.parametrize(("share", "is_stalled"), [(0.0, True), (0.001, True), (0.05, False), (2.0, False)])
def test_an_engine_that_computes_is_slow_and_does_not_hang(share: float, is_stalled: bool) -> None:
    engine = Engine()
    check = StallCheck(LIMIT_S, engine)
    check.start()
    engine.used_s += share * LIMIT_S
    assert check.is_stalled() is is_stalled


def test_computing_counts_since_the_last_look() -> None:
    engine = Engine()
    check = StallCheck(LIMIT_S, engine)
    engine.used_s += LIMIT_S
    assert not check.is_stalled()
    assert check.is_stalled()


@pytest.mark.parametrize("longest_s", [0.0, 3 * LIMIT_S])
def test_an_endless_loop_hangs_in_the_end(longest_s: float) -> None:
    engine = Engine()
    check = StallCheck(LIMIT_S, engine)
    engine.used_s += longest_s
    check.note_answer()
    num_looks = 1
    engine.used_s += LIMIT_S
    while not check.is_stalled():
        engine.used_s += LIMIT_S
        num_looks += 1
    assert num_looks == SPIN_FACTOR * max(LIMIT_S, longest_s) / LIMIT_S + 1


@pytest.fixture
def child() -> Iterator["subprocess.Popen[str]"]:
    program = "print(sum(range(5_000_000)), flush=True)\nimport signal\nsignal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_cpu_seconds_of_processes_below_count(child: "subprocess.Popen[str]") -> None:
    used_s = engine_cpu_seconds(on_gpu=False)
    assert used_s is not None
    assert child.stdout is not None
    child.stdout.readline()
    before = used_s()
    assert before > 0
    child.kill()
    child.wait()
    assert used_s() == before


def test_on_a_gpu_nothing_is_counted() -> None:
    assert engine_cpu_seconds(on_gpu=True) is None


@virtual_time
async def test_an_engine_that_answers_others_is_only_slow() -> None:
    limit_s = 2.0
    watchdog, is_answered = EngineWatchdog(StallCheck(limit_s, None), HangsError), asyncio.Event()

    async def slow() -> None:
        async with watchdog.waiting():
            await is_answered.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(slow())
        for _ in range(4):
            async with watchdog.waiting():
                await asyncio.sleep(0.3 * limit_s)
        is_answered.set()


@virtual_time
async def test_an_engine_that_computes_is_not_ended_before_it_stands_still() -> None:
    limit_s, looks = 0.02, 0
    num_looks_of_work = 5

    def used_s() -> float:
        nonlocal looks
        looks += 1
        return limit_s * min(looks, num_looks_of_work)

    watchdog = EngineWatchdog(StallCheck(limit_s, used_s), HangsError)
    with pytest.raises(HangsError, match="computes nothing"):
        async with watchdog.waiting():
            await asyncio.Event().wait()
    assert looks > num_looks_of_work


@virtual_time
async def test_work_that_is_cancelled_is_no_answer() -> None:
    """Callers that come and go keep no hanging engine alive."""
    watchdog = EngineWatchdog(StallCheck(0.1, None), HangsError)

    async def wait() -> None:
        async with watchdog.waiting():
            await asyncio.Event().wait()

    hanging = asyncio.create_task(wait())
    async with asyncio.timeout(30):
        while not hanging.done():
            cancelled = asyncio.create_task(wait())
            await asyncio.wait({cancelled}, timeout=0.01)
            cancelled.cancel()
            await asyncio.wait({cancelled})
    with pytest.raises(HangsError):
        hanging.result()
