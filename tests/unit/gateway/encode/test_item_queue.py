"""The order in which items are stepped."""

import asyncio

from triptych_common.protocol.ids import MmHash
from triptych_gateway.encode.item_queue import ItemQueue

A, B, C = MmHash("a" * 64), MmHash("b" * 64), MmHash("c" * 64)


async def taken(touched: ItemQueue) -> list[MmHash]:
    return [await touched.get() for _ in range(len(touched))]


async def test_what_no_encoder_knows_goes_first_and_each_once() -> None:
    touched = ItemQueue()
    for mm_hash, is_urgent in ((A, False), (B, False), (C, True), (B, False), (B, True), (C, False)):
        touched.add(mm_hash, is_urgent=is_urgent)
    assert await taken(touched) == [C, B, A]


async def test_each_item_wakes_one_of_those_who_wait() -> None:
    touched = ItemQueue()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        waiting = [group.create_task(touched.get()) for _ in range(2)]
        await asyncio.sleep(0)
        touched.add(A, is_urgent=False)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert [task.done() for task in waiting].count(True) == 1
        touched.add(B, is_urgent=False)
    assert {task.result() for task in waiting} == {A, B}
