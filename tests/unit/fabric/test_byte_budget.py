"""The bound on reserved bytes: who waits, who goes first, and that all of it comes back."""

import asyncio
import contextlib

import pytest

from triptych_common.protocol.messages import EncodeClass
from triptych_fabric.receiver.reception import ByteBudget

INTERACTIVE, BATCH = EncodeClass.INTERACTIVE, EncodeClass.BATCH


class Holder:
    """Holds a part of the budget, from its grant until `end`."""

    def __init__(
        self, budget: ByteBudget, num_bytes: int, encode_class: EncodeClass = BATCH, *, sealed: bool = True
    ) -> None:
        self.has_it = asyncio.Event()
        self._end = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run(budget, num_bytes, encode_class, sealed))

    async def end(self) -> None:
        self._end.set()
        await self.task

    async def _run(self, budget: ByteBudget, num_bytes: int, encode_class: EncodeClass, sealed: bool) -> None:
        async with budget.hold(num_bytes, encode_class, is_sealed=sealed):
            self.has_it.set()
            await self._end.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_urgent_ones_go_first() -> None:
    budget = ByteBudget(100)
    first = Holder(budget, 100)
    later, urgent = Holder(budget, 100), Holder(budget, 100, INTERACTIVE)
    await settle()
    await first.end()
    await settle()
    assert (later.has_it.is_set(), urgent.has_it.is_set()) == (False, True)
    await urgent.end()
    await later.end()


async def test_small_ones_do_not_pass_a_large_one() -> None:
    budget = ByteBudget(100)
    first = Holder(budget, 50)
    large, small = Holder(budget, 80), Holder(budget, 10)
    await settle()
    assert not small.has_it.is_set()
    await first.end()
    for each in (large, small):
        await each.end()


async def test_unsealed_ones_leave_room() -> None:
    budget = ByteBudget(100)
    waiting = [Holder(budget, 25, sealed=False) for _ in range(4)]
    await settle()
    assert [each.has_it.is_set() for each in waiting] == [True, True, True, False]
    sealed = Holder(budget, 25)
    await settle()
    assert sealed.has_it.is_set()
    for each in (*waiting, sealed):
        await each.end()
    assert budget.num_bytes == 0


async def test_what_is_larger_than_all_has_it_alone() -> None:
    budget = ByteBudget(100)
    small = Holder(budget, 1)
    large = Holder(budget, 1000)
    await settle()
    assert not large.has_it.is_set()
    await small.end()
    await large.end()
    assert budget.num_bytes == 0


@pytest.mark.parametrize("has_it", [True, False])
async def test_a_cancelled_one_gives_back(has_it: bool) -> None:
    budget = ByteBudget(100)
    first, second = Holder(budget, 100), Holder(budget, 100)
    await settle()
    cancelled, other = (first, second) if has_it else (second, first)
    cancelled.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cancelled.task
    await settle()
    assert other.has_it.is_set()
    await other.end()
    assert budget.num_bytes == 0
