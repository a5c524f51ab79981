"""An engine hangs when it neither answers nor makes progress, or computes without an end."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from tests.support.virtual_time import in_virtual_time
from triptych_common.domain.errors import TriptychError
from triptych_common.runtime.liveness import Activity
from triptych_vllm_connector.host.engine_watchdog import (
    NUM_LOOKS,
    SPIN_FACTOR,
    EngineWatchdog,
    engine_activity,
)

LIMIT_S = 60.0
LOOK_S = LIMIT_S / NUM_LOOKS


class HangsError(TriptychError):
    """The engine hangs."""


@dataclass
class Engine:
    """Made-up engine: each second without an answer it computes `cpu_share` of a core."""

    cpu_share: float = 0.0
    is_gpu_busy: bool = False
    seen: Activity = field(default_factory=lambda: Activity(0.0, frozenset()))

    def __call__(self) -> Activity:
        cpu_s = self.seen.cpu_s + self.cpu_share * LOOK_S
        self.seen = replace(self.seen, used_s=cpu_s, cpu_s=cpu_s, is_gpu_busy=self.is_gpu_busy)
        return self.seen


async def seconds_until_hung(watchdog: EngineWatchdog, most_s: float = 100 * LIMIT_S) -> float:
    """Return when work without an answer is ended; `most_s` if it is not by then."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        async with asyncio.timeout(most_s), watchdog.waiting():
            await asyncio.Event().wait()
    except HangsError:
        return loop.time() - began
    except TimeoutError:
        return most_s
    raise AssertionError("unreachable")


async def answer(watchdog: EngineWatchdog, after_s: float = 0.0) -> None:
    async with watchdog.waiting():
        await asyncio.sleep(after_s)


@pytest.mark.parametrize("share", [0.0, 0.001])
@in_virtual_time
async def test_an_engine_without_progress_hangs_at_the_limit(share: float) -> None:
    assert await seconds_until_hung(EngineWatchdog(LIMIT_S, Engine(share), HangsError)) == pytest.approx(
        LIMIT_S
    )


@in_virtual_time
async def test_an_engine_with_little_of_a_core_is_slow() -> None:
    """4 % of a core, as seen on a busy machine."""
    watchdog = EngineWatchdog(LIMIT_S, Engine(cpu_share=0.04), HangsError)
    assert await seconds_until_hung(watchdog) == 100 * LIMIT_S


@in_virtual_time
async def test_work_before_the_last_answer_is_no_progress() -> None:
    engine = Engine(cpu_share=1.0)
    watchdog = EngineWatchdog(LIMIT_S, engine, HangsError)
    await answer(watchdog, 2.5 * LOOK_S)
    engine.cpu_share = 0.0
    engine.seen = replace(engine.seen, used_s=1000.0, cpu_s=1000.0)
    assert await seconds_until_hung(watchdog) == pytest.approx(LIMIT_S)


@pytest.mark.parametrize("longest_s", [0.0, 3 * LIMIT_S])
@in_virtual_time
async def test_an_endless_loop_hangs_in_the_end(longest_s: float) -> None:
    watchdog = EngineWatchdog(LIMIT_S, Engine(cpu_share=1.0), HangsError)
    await answer(watchdog, longest_s)
    allowed_s = SPIN_FACTOR * max(LIMIT_S, longest_s)
    assert await seconds_until_hung(watchdog) == pytest.approx(allowed_s, rel=0.2)


class TestOnAGpu:
    """A host that waits for its GPU may spin, and a kernel that hangs keeps the GPU busy."""

    @in_virtual_time
    async def test_a_host_that_works_beside_an_idle_gpu_is_slow(self) -> None:
        """It compiles a kernel, or shares its cores with other programs."""
        watchdog = EngineWatchdog(LIMIT_S, Engine(cpu_share=0.2), HangsError)
        await answer(watchdog)
        assert await seconds_until_hung(watchdog, 4 * SPIN_FACTOR * LIMIT_S) == 4 * SPIN_FACTOR * LIMIT_S

    @in_virtual_time
    async def test_a_first_answer_may_keep_the_gpu_busy_for_long(self) -> None:
        watchdog = EngineWatchdog(LIMIT_S, Engine(cpu_share=1.0, is_gpu_busy=True), HangsError)
        assert await seconds_until_hung(watchdog) == pytest.approx(SPIN_FACTOR * LIMIT_S, rel=0.1)

    @in_virtual_time
    async def test_a_kernel_that_hangs_is_found_at_the_limit_where_answers_are_quick(self) -> None:
        watchdog = EngineWatchdog(LIMIT_S, Engine(cpu_share=1.0, is_gpu_busy=True), HangsError)
        await answer(watchdog, 1.0)
        assert await seconds_until_hung(watchdog) == pytest.approx(LIMIT_S)

    @in_virtual_time
    async def test_a_busy_gpu_may_take_a_multiple_of_what_it_took_before(self) -> None:
        watchdog = EngineWatchdog(LIMIT_S, Engine(is_gpu_busy=True), HangsError)
        await answer(watchdog, 0.7 * LIMIT_S)
        found_s = await seconds_until_hung(watchdog)
        assert 4 * LIMIT_S < found_s < SPIN_FACTOR * LIMIT_S

    @in_virtual_time
    async def test_a_gpu_that_begins_to_compute_has_made_progress(self) -> None:
        engine = Engine(cpu_share=1.0)
        watchdog = EngineWatchdog(LIMIT_S, engine, HangsError)
        await answer(watchdog, 1.5 * LOOK_S)
        asyncio.get_running_loop().call_later(3 * LIMIT_S, setattr, engine, "is_gpu_busy", True)
        assert await seconds_until_hung(watchdog) > 3 * LIMIT_S + LOOK_S


@pytest.fixture
def child() -> Iterator["subprocess.Popen[str]"]:
    program = "print(sum(range(5_000_000)), flush=True)\nimport signal\nsignal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_cpu_seconds_of_processes_below_count(child: "subprocess.Popen[str]") -> None:
    activity = engine_activity(lambda: False)
    assert child.stdout is not None
    child.stdout.readline()
    before = activity()
    assert before.cpu_s > 0
    assert before == Activity(before.cpu_s, frozenset(), before.cpu_s), (
        "timers of what hangs wait for a core, too"
    )
    child.kill()
    child.wait()
    assert activity().cpu_s == before.cpu_s


def test_a_gpu_is_asked_at_each_look() -> None:
    answers = iter([True, False])
    activity = engine_activity(lambda: next(answers))
    assert activity().is_gpu_busy
    assert not activity().is_gpu_busy


@in_virtual_time
async def test_an_engine_that_answers_others_is_only_slow() -> None:
    limit_s = 2.0
    watchdog, is_answered = EngineWatchdog(limit_s, Engine(), HangsError), asyncio.Event()

    async def slow() -> None:
        async with watchdog.waiting():
            await is_answered.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(slow())
        for _ in range(4):
            async with watchdog.waiting():
                await asyncio.sleep(0.3 * limit_s)
        is_answered.set()


@in_virtual_time
async def test_work_that_is_cancelled_is_no_answer() -> None:
    """Callers that come and go keep no hanging engine alive."""
    watchdog = EngineWatchdog(0.1, Engine(), HangsError)

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
