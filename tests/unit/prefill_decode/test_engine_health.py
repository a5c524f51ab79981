"""An engine that lives and hangs is noticed; one that is slow is left alone."""

import asyncio

import pytest

from tests.support.virtual_time import in_virtual_time
from triptych_common.runtime.liveness import Activity
from triptych_prefill_decode.engine_health import EngineGoneError, watch_answers
from triptych_vllm_connector.host.engine_watchdog import NUM_LOOKS, EngineWatchdog

TIMEOUT_S = 1.0


def watchdog(limit_s: float = TIMEOUT_S, *used_s: float) -> EngineWatchdog:
    """Return the watchdog of an engine that used so many CPU seconds at each look, and then none."""
    used = iter(used_s)

    def activity() -> Activity:
        return Activity(next(used, used_s[-1] if used_s else 0.0), frozenset())

    return EngineWatchdog(limit_s, activity, EngineGoneError)


class Engine:
    """Answers after `delays_s`, one for each question; then it stands still."""

    def __init__(self, *delays_s: float) -> None:
        self._delays_s = list(delays_s)
        self.num_answers = 0

    async def is_sleeping(self) -> bool:
        if not self._delays_s:
            await asyncio.Event().wait()
        await asyncio.sleep(self._delays_s.pop(0))
        self.num_answers += 1
        return False


@in_virtual_time
async def test_an_engine_that_hangs_is_gone() -> None:
    engine = Engine(0, 0, 0.3, 0.3, 0.3, 0.3)
    with pytest.raises(EngineGoneError, match="has not answered"):
        async with asyncio.timeout(10):
            await watch_answers(engine, watchdog(), interval_s=0)
    assert engine.num_answers == 6


async def test_what_the_engine_raises_is_raised() -> None:
    class DeadError(Exception): ...

    class DeadEngine:
        async def is_sleeping(self) -> bool:
            raise DeadError

    with pytest.raises(DeadError):
        await watch_answers(DeadEngine(), watchdog(), interval_s=0)


@in_virtual_time
async def test_an_engine_that_computes_is_asked_on() -> None:
    """It needs five times the limit: other programs have the cores."""
    limit_s = 0.07
    engine = Engine(5 * limit_s)
    slow = watchdog(limit_s, *[0.001 * number for number in range(5 * NUM_LOOKS)])
    with pytest.raises(EngineGoneError, match="makes no progress"):
        async with asyncio.timeout(10):
            await watch_answers(engine, slow, interval_s=0)
    assert engine.num_answers == 1
