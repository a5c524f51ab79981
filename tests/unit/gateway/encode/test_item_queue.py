"""The order in which items are stepped."""

import asyncio

from triptych_common.protocol.ids import MmHash
from triptych_gateway.encode.item_queue import ItemQueue

A, B, C = MmHash("a" * 64), MmHash("b" * 64), MmHash("c" * 64)


D = MmHash("d" * 64)


async def taken(queue: ItemQueue) -> list[MmHash]:
    return [(await queue.take_item())[0] for _ in range(len(queue))]


async def test_what_no_encoder_knows_goes_first_and_each_once() -> None:
    queue = ItemQueue()
    for mm_hash, is_urgent in ((A, False), (B, False), (C, True), (B, False), (B, True), (C, False)):
        queue.add_item(mm_hash, is_urgent=is_urgent)
    assert await taken(queue) == [C, B, A]


async def test_each_item_wakes_one_of_the_waiting_tasks() -> None:
    queue = ItemQueue()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        waiting = [group.create_task(queue.take_item()) for _ in range(2)]
        await asyncio.sleep(0)
        queue.add_item(A, is_urgent=False)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert [task.done() for task in waiting].count(True) == 1
        queue.add_item(B, is_urgent=False)
    assert {task.result() for task in waiting} == {(A, False), (B, False)}


async def test_an_item_that_is_stepped_is_not_taken_twice_and_comes_next() -> None:
    queue = ItemQueue()
    queue.add_item(A, is_urgent=False)
    assert await queue.take_item() == (A, False)
    for mm_hash in (A, B, C):
        queue.add_item(mm_hash, is_urgent=False, check=mm_hash == A)
    assert await queue.take_item() == (B, False)
    queue.finish_item(A)
    assert await queue.take_item() == (A, True)
    queue.finish_item(A)
    assert await queue.take_item() == (C, False)


async def test_a_round_ends_when_each_of_its_items_was_stepped() -> None:
    queue = ItemQueue()
    queue.begin_round([A, B])
    for mm_hash in (A, B):
        queue.add_item(mm_hash, is_urgent=False, check=True)
    for mm_hash in (A, B):
        assert queue.has_round
        assert await queue.take_item() == (mm_hash, True)
        queue.finish_item(mm_hash)
    assert not queue.has_round


async def test_orders_of_one_request_are_stepped_one_after_the_other() -> None:
    queue = ItemQueue()
    for mm_hash in (A, B, C):
        queue.add_item(mm_hash, is_urgent=True, lane="req-1")
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for mm_hash in (A, B, C):
            assert await queue.take_item() == (mm_hash, False)
            another = group.create_task(queue.take_item())
            await asyncio.sleep(0)
            assert not another.done(), "another publisher would overtake the first"
            another.cancel()
            queue.finish_item(mm_hash)
    assert len(queue) == 0
    assert not queue._lanes


async def test_requests_take_turns() -> None:
    queue = ItemQueue()
    for mm_hash in (A, B, C):
        queue.add_item(mm_hash, is_urgent=True, lane="many")
    queue.add_item(D, is_urgent=True, lane="one")
    assert await queue.take_item() == (A, False)
    assert await queue.take_item() == (D, False)
    queue.finish_item(A)
    queue.finish_item(D)
    assert await queue.take_item() == (B, False)


async def test_checks_go_on_beside_a_request_whose_turn_lasts() -> None:
    queue = ItemQueue()
    for mm_hash in (A, B):
        queue.add_item(mm_hash, is_urgent=True, lane="req-1")
    queue.add_item(C, is_urgent=False)
    assert [await queue.take_item() for _ in range(2)] == [(A, False), (C, False)]


async def test_an_order_that_changed_during_its_step_keeps_its_place() -> None:
    queue = ItemQueue()
    for mm_hash in (A, B):
        queue.add_item(mm_hash, is_urgent=True, lane="req-1")
    assert await queue.take_item() == (A, False)
    queue.add_item(A, is_urgent=True)
    queue.finish_item(A)
    assert [await queue.take_item(), len(queue)] == [(A, False), 1]
    queue.finish_item(A)
    assert await queue.take_item() == (B, False)


async def test_an_item_that_is_ordered_during_its_step_does_not_overtake_its_request() -> None:
    queue = ItemQueue()
    queue.add_item(B, is_urgent=False)
    assert await queue.take_item() == (B, False)
    queue.add_item(A, is_urgent=True, lane="request")
    queue.add_item(B, is_urgent=True, lane="request")
    queue.finish_item(B)
    assert await queue.take_item() == (A, False)
    queue.finish_item(A)
    assert await queue.take_item() == (B, False)


async def test_requests_of_a_higher_priority_go_first() -> None:
    queue = ItemQueue()
    for mm_hash, lane, priority in ((A, "later", 5), (B, "first", -1), (C, "first", -1), (D, "usual", 0)):
        queue.add_item(mm_hash, is_urgent=True, lane=lane, priority=priority)
    assert await queue.take_item() == (B, False)
    assert await queue.take_item() == (D, False), "a request's orders are stepped one after the other"
    queue.add_item(B, is_urgent=True, lane="first", priority=-1)
    queue.finish_item(B)
    assert await queue.take_item() == (B, False)
    assert await queue.take_item() == (A, False)
    queue.finish_item(B)
    assert await queue.take_item() == (C, False)
