"""An engine that lives and hangs is noticed; one that is slow is left alone."""

import asyncio

import pytest

from tests.support.virtual_time import virtual_time
from triptych_prefill_decode.engine_health import EngineGoneError, watch_answers
from triptych_vllm_connector.host.engine_watchdog import StallCheck

TIMEOUT_S = 1.0


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


@virtual_time
async def test_an_engine_that_hangs_is_gone() -> None:
    engine = Engine(0, 0, 0.3, 0.3, 0.3, 0.3)
    with pytest.raises(EngineGoneError, match="has not answered"):
        async with asyncio.timeout(10):
            await watch_answers(engine, StallCheck(TIMEOUT_S, None), interval_s=0)
    assert engine.num_answers == 6


async def test_what_the_engine_raises_is_raised() -> None:
    class DeadError(Exception): ...

    class DeadEngine:
        async def is_sleeping(self) -> bool:
            raise DeadError

    with pytest.raises(DeadError):
        await watch_answers(DeadEngine(), StallCheck(TIMEOUT_S, None), interval_s=0)


@virtual_time
async def test_an_engine_that_computes_is_asked_on() -> None:
    """It needs five times the limit: other programs have the cores."""
    limit_s, used_s = 0.05, iter([0.0, 0.0, 0.01, 0.02, 0.03, 0.04, 0.05])
    engine = Engine(5 * limit_s)
    check = StallCheck(limit_s, lambda: next(used_s, 0.05))
    with pytest.raises(EngineGoneError, match="computes nothing"):
        async with asyncio.timeout(10):
            await watch_answers(engine, check, interval_s=0)
    assert engine.num_answers == 1
