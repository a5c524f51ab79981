"""Work under guards: the first guard that raises ends it, and no task is left."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from tests.support.virtual_time import in_virtual_time
from triptych_gateway.race import Guard, StepTimer, race


async def forever() -> None:
    await asyncio.Event().wait()


async def later() -> int:
    """After some turns of the event loop."""
    for _ in range(3):
        await asyncio.sleep(0)
    return 7


async def test_guard_that_returns_does_not_end_the_work() -> None:
    assert await race(later(), asyncio.sleep(0)) == 7


async def test_guard_that_raises_cancels_the_work() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await forever()
        finally:
            ended.set()

    with pytest.raises(LookupError):
        await race(work(), fail())
    assert ended.is_set()


@in_virtual_time
async def test_cancelled_from_outside_leaves_no_task() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await race(forever(), forever())
    assert len(asyncio.all_tasks()) == 1


async def fail() -> None:
    raise LookupError


async def test_a_guard_ends_its_block_and_the_task_goes_on() -> None:
    guard = Guard()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        with guard:
            loop.call_soon(guard.fail, LookupError())
            loop.call_soon(guard.fail, ValueError())  # too late
            await forever()

    with pytest.raises(LookupError):
        await work()
    await asyncio.sleep(0)
    guard.fail(LookupError())  # no block any more
    await asyncio.sleep(0)


async def test_the_guards_error_explains_the_blocks() -> None:
    async def work() -> None:
        with Guard() as guard:
            asyncio.get_running_loop().call_soon(guard.fail, LookupError())
            try:
                await forever()
            except asyncio.CancelledError:
                raise ValueError from None

    with pytest.raises(LookupError) as caught:
        await work()
    assert isinstance(caught.value.__cause__, ValueError)


async def test_a_block_that_ended_well_stays_so() -> None:
    with Guard() as guard:
        asyncio.get_running_loop().call_soon(guard.fail, LookupError())
        try:
            await forever()
        except asyncio.CancelledError:
            pass
    await asyncio.sleep(0)


async def test_a_cancel_from_outside_goes_through_guards() -> None:
    guards: list[Guard] = []

    async def work() -> None:
        with Guard() as guard:
            guards.append(guard)
            await forever()

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    guards[0].fail(LookupError())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@in_virtual_time
async def test_a_guard_around_a_timeout() -> None:
    async def work() -> None:
        with Guard() as guard:
            asyncio.get_running_loop().call_soon(guard.fail, LookupError())
            async with asyncio.timeout(10):
                with Guard():
                    await forever()

    with pytest.raises(LookupError):
        await work()


@in_virtual_time
async def test_a_timeout_around_a_guard() -> None:
    async def work() -> None:
        async with asyncio.timeout(60):
            with Guard():
                await forever()

    with pytest.raises(TimeoutError):
        await work()


@in_virtual_time
async def test_a_step_that_takes_too_long_fails_with_its_own_error() -> None:
    async def work() -> None:
        with Guard() as guard, StepTimer(guard, 0.05) as timer:
            timer.begin_step(ValueError)
            await asyncio.sleep(0)
            timer.begin_step(LookupError)
            await forever()

    with pytest.raises(LookupError):
        await work()


@in_virtual_time
async def test_steps_together_may_take_longer_than_the_limit() -> None:
    with Guard() as guard, StepTimer(guard, 5.0) as timer:
        for _ in range(4):
            timer.begin_step(LookupError)
            await asyncio.sleep(4.0)
    timer.close()


class Media:
    """What a failed request must not keep."""


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def hold_media(held: "list[weakref.ref[Media]]", fails: bool) -> None:
    media = Media()
    held.append(weakref.ref(media))
    if fails:
        raise ValueError("the work")
    await asyncio.Event().wait()


async def fail_at_once() -> None:
    raise ValueError("the guard")  # the work has begun: its task was made first


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("fails", [True, False])
async def test_a_race_that_fails_keeps_nothing_that_the_work_held(fails: bool) -> None:
    held: list[weakref.ref[Media]] = []
    guards = [] if fails else [fail_at_once()]
    with pytest.raises(ValueError, match="the work" if fails else "the guard"):
        await race(hold_media(held, fails), *guards)
    await asyncio.sleep(0)  # the loop lets go of the tasks' last callbacks
    assert held[0]() is None


@pytest.mark.usefixtures("no_collection")
async def test_a_guard_that_fails_keeps_nothing_that_its_block_held() -> None:
    held: list[weakref.ref[Media]] = []

    async def serve() -> None:
        with Guard() as guard:
            asyncio.get_running_loop().call_soon(guard.fail, ValueError("gone"))
            await hold_media(held, fails=False)

    with pytest.raises(ValueError, match="gone"):
        await serve()
    await asyncio.sleep(0)
    assert held[0]() is None
