"""Work under guards: the first guard that raises ends it, and no task is left."""

import asyncio

import pytest

from triptych_gateway.race import race


async def test_result() -> None:
    assert await race(asyncio.sleep(0, 7), asyncio.sleep(10)) == 7


async def test_guard_that_returns_does_not_end_the_work() -> None:
    assert await race(asyncio.sleep(0.01, 7), asyncio.sleep(0)) == 7


async def test_guard_that_raises_cancels_the_work() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            ended.set()

    with pytest.raises(LookupError):
        await race(work(), fail())
    assert ended.is_set()


async def test_work_that_raises() -> None:
    with pytest.raises(LookupError):
        await race(fail(), asyncio.sleep(10))


async def test_cancelled_from_outside_leaves_no_task() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await race(asyncio.sleep(10), asyncio.sleep(10))
    assert len(asyncio.all_tasks()) == 1


async def fail() -> None:
    raise LookupError
