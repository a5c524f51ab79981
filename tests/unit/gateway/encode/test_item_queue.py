"""The order in which items are stepped."""

import asyncio

from triptych_common.domain.fair_turns import Lane
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncodeClass
from triptych_gateway.encode.item_queue import ItemQueue, OrderPlace
from triptych_gateway.encode.job_window import JobWindow
from triptych_gateway.routing.encode_capacity import Capacity

A, B, C = MmHash("a" * 64), MmHash("b" * 64), MmHash("c" * 64)


D = MmHash("d" * 64)


def new_queue(num_slots: int = 100) -> ItemQueue:
    return ItemQueue(JobWindow(lambda digest: Capacity(num_slots, 0, 1)))


async def taken(queue: ItemQueue) -> list[MmHash]:
    return [(await queue.take_item())[0] for _ in range(len(queue))]


async def test_what_no_encoder_knows_goes_first_and_each_once() -> None:
    queue = new_queue()
    for mm_hash, is_urgent in ((A, False), (B, False), (C, True), (B, False), (B, True), (C, False)):
        queue.add_item(mm_hash, is_urgent=is_urgent)
    assert await taken(queue) == [C, B, A]


async def test_each_item_wakes_one_of_the_waiting_tasks() -> None:
    queue = new_queue()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        waiting = [group.create_task(queue.take_item()) for _ in range(2)]
        await asyncio.sleep(0)
        queue.add_item(A, is_urgent=False)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert [task.done() for task in waiting].count(True) == 1
        queue.add_item(B, is_urgent=False)
    assert {task.result() for task in waiting} == {(A, False), (B, False)}


async def test_an_item_that_is_stepped_is_not_taken_twice_and_comes_next() -> None:
    queue = new_queue()
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
    queue = new_queue()
    queue.begin_round([A, B])
    for mm_hash in (A, B):
        queue.add_item(mm_hash, is_urgent=False, check=True)
    for mm_hash in (A, B):
        assert queue.has_round
        assert await queue.take_item() == (mm_hash, True)
        queue.finish_item(mm_hash)
    assert not queue.has_round


async def test_orders_of_one_request_are_stepped_one_after_the_other() -> None:
    queue = new_queue()
    for mm_hash in (A, B, C):
        queue.add_item(mm_hash, is_urgent=True, request="req-1")
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for mm_hash in (A, B, C):
            assert await queue.take_item() == (mm_hash, False)
            another = group.create_task(queue.take_item())
            await asyncio.sleep(0)
            assert not another.done(), "another publisher would overtake the first"
            another.cancel()
            queue.finish_item(mm_hash)
    assert len(queue) == 0
    assert not queue._requests


async def test_requests_take_turns() -> None:
    queue = new_queue()
    for mm_hash in (A, B, C):
        queue.add_item(mm_hash, is_urgent=True, request="many")
    queue.add_item(D, is_urgent=True, request="one")
    assert await queue.take_item() == (A, False)
    assert await queue.take_item() == (D, False)
    queue.finish_item(A)
    queue.finish_item(D)
    assert await queue.take_item() == (B, False)


async def test_checks_go_on_beside_a_request_whose_turn_lasts() -> None:
    queue = new_queue()
    for mm_hash in (A, B):
        queue.add_item(mm_hash, is_urgent=True, request="req-1")
    queue.add_item(C, is_urgent=False)
    assert [await queue.take_item() for _ in range(2)] == [(A, False), (C, False)]


async def test_an_order_that_changed_during_its_step_keeps_its_place() -> None:
    queue = new_queue()
    for mm_hash in (A, B):
        queue.add_item(mm_hash, is_urgent=True, request="req-1")
    assert await queue.take_item() == (A, False)
    queue.add_item(A, is_urgent=True)
    queue.finish_item(A)
    assert [await queue.take_item(), len(queue)] == [(A, False), 1]
    queue.finish_item(A)
    assert await queue.take_item() == (B, False)


async def test_an_item_that_is_ordered_during_its_step_does_not_overtake_its_request() -> None:
    queue = new_queue()
    queue.add_item(B, is_urgent=False)
    assert await queue.take_item() == (B, False)
    queue.add_item(A, is_urgent=True, request="request")
    queue.add_item(B, is_urgent=True, request="request")
    queue.finish_item(B)
    assert await queue.take_item() == (A, False)
    queue.finish_item(A)
    assert await queue.take_item() == (B, False)


def place_of(encode_class: EncodeClass, flow: str = "", deadline: float = 0.0) -> OrderPlace:
    return OrderPlace("", Lane(encode_class, flow), deadline)


async def test_interactive_orders_go_before_those_of_a_batch() -> None:
    queue = new_queue()
    for mm_hash, request, each in (
        (A, "later", EncodeClass.BATCH),
        (B, "first", EncodeClass.INTERACTIVE),
        (C, "first", EncodeClass.INTERACTIVE),
    ):
        queue.add_item(mm_hash, is_urgent=True, request=request, place=place_of(each))
    assert await queue.take_item() == (B, False)
    assert await queue.take_item() == (A, False), "a request's orders are stepped one after the other"
    queue.finish_item(B)
    assert await queue.take_item() == (C, False)


async def test_what_has_the_nearest_deadline_goes_first_of_its_lane() -> None:
    queue = new_queue()
    for mm_hash, request, deadline in ((A, "a", 9.0), (B, "b", 5.0), (C, "c", 7.0)):
        place = place_of(EncodeClass.INTERACTIVE, deadline=deadline)
        queue.add_item(mm_hash, is_urgent=True, request=request, place=place)
    assert [mm_hash for mm_hash, _ in [await queue.take_item() for _ in range(3)]] == [B, C, A]


async def test_an_order_waits_until_there_is_room_for_its_job_and_checks_go_on() -> None:
    queue = new_queue(num_slots=1)
    for mm_hash in (A, B):
        queue.add_item(mm_hash, is_urgent=True, request=mm_hash)
    queue.add_item(C, is_urgent=False)
    assert [await queue.take_item() for _ in range(2)] == [(A, False), (C, False)]
    queue.confirm_job(A)
    queue.finish_item(A)
    waiting = asyncio.ensure_future(queue.take_item())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert queue.num_held("") == {"": 1}
    assert await queue.wait_held_back() == {""}
    queue.end_job(A)
    assert await waiting == (B, False)


async def test_an_order_that_is_not_published_here_leaves_its_room() -> None:
    queue = new_queue(num_slots=1)
    for mm_hash in (A, B):
        queue.add_item(mm_hash, is_urgent=True, request=mm_hash)
    assert await queue.take_item() == (A, False)
    queue.finish_item(A)
    assert await queue.take_item() == (B, False)


async def test_an_order_that_is_withdrawn_is_not_taken() -> None:
    queue = new_queue()
    for mm_hash in (A, B):
        queue.add_item(mm_hash, is_urgent=True, request="many")
    assert queue.withdraw_item(A)
    assert not queue.withdraw_item(A)
    assert await taken(queue) == [B]
