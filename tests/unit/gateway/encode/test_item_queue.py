"""The order in which items are stepped."""

import asyncio

from triptych_common.domain.fair_queue import DEFAULT_KEY, MAX_PASSED, FairKey
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncodeClass
from triptych_common.protocol.names import DEFAULT_STORE
from triptych_gateway.encode.item_queue import ItemQueue, OrderPlace, OrdersAhead
from triptych_gateway.encode.job_window import Capacity, JobWindow

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
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
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
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
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
    return OrderPlace("", FairKey(encode_class, flow), deadline)


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
    queue.window.confirm_job(A, DEFAULT_STORE)
    queue.finish_item(A)
    waiting = asyncio.ensure_future(queue.take_item())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert queue.num_waiting() == {DEFAULT_KEY: 1}
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


# ---- orders whose fair key matters ------------------------------------------------------------------------
ONE_SPACE, OTHER_SPACE = "1" * 64, "2" * 64
FLOOD, ONE = FairKey(flow="flood"), FairKey(flow="one")
BATCH = FairKey(EncodeClass.BATCH, "one")


def hash_of(number: int) -> MmHash:
    return MmHash(f"{number:064x}")


def order(queue: ItemQueue, mm_hash: MmHash, fair_key: FairKey, request: str, index: int = 0) -> None:
    place = OrderPlace(ONE_SPACE, fair_key, deadline=10.0, index=index)
    queue.add_item(mm_hash, is_urgent=True, request=request, place=place)


async def test_an_order_that_is_made_during_a_check_of_its_item_stands_where_it_was_put() -> None:
    """An encoder's message that comes afterwards does not move it before all others."""
    queue = new_queue()
    queue.add_item(A, is_urgent=False, check=True)
    assert await queue.take_item() == (A, True)
    order(queue, B, ONE, "one")
    order(queue, A, FLOOD, "flood")
    queue.add_item(A, is_urgent=True)
    queue.finish_item(A)
    assert queue.place_held(A) == ("flood", OrderPlace(ONE_SPACE, FLOOD, 10.0))
    assert await taken(queue) == [B, A]


async def test_what_needs_no_job_any_more_after_its_step_waits_for_no_room() -> None:
    queue = new_queue(num_slots=1)
    order(queue, A, ONE, "one")
    order(queue, B, FLOOD, "flood")
    assert await queue.take_item() == (A, False)
    queue.add_item(C, is_urgent=False)
    queue.add_item(A, is_urgent=True)
    queue.window.confirm_job(A, DEFAULT_STORE)
    queue.finish_item(A)
    assert await queue.take_item() == (A, False), "its job is published: the window is full of it"
    queue.add_item(A, is_urgent=False)
    queue.finish_item(A)
    assert await queue.take_item() == (A, False)
    assert queue.num_waiting() == {FLOOD: 1}, "nothing of it waits"


async def test_a_class_without_room_ages_all_the_same() -> None:
    """One flow has all places but the spare one, so its lower class waits; others' jobs come and go there."""
    queue = ItemQueue(JobWindow(lambda digest: Capacity(2, 1, 1)))
    lower = FairKey(EncodeClass.BATCH, "flood")
    order(queue, A, FLOOD, "flood")
    order(queue, B, lower, "later")
    assert await queue.take_item() == (A, False)
    queue.window.confirm_job(A, DEFAULT_STORE)
    queue.finish_item(A)
    for number in range(MAX_PASSED):
        order(queue, hash_of(number), ONE, f"one-{number}")
        assert await queue.take_item() == (hash_of(number), False)
        queue.finish_item(hash_of(number))
    queue.end_job(A)
    order(queue, C, ONE, "one")
    assert await queue.take_item() == (B, False), "it was passed over often enough"


async def test_orders_of_a_request_keep_the_order_of_its_prompt_however_they_come_back() -> None:
    queue = new_queue()
    for index, mm_hash in enumerate((A, B, C)):
        order(queue, mm_hash, ONE, "one", index)
    assert queue.withdraw_item(A)
    order(queue, A, ONE, "one", 0)
    found = []
    for _ in range(3):
        found.append((await queue.take_item())[0])
        queue.finish_item(found[-1])
    assert found == [A, B, C]


def test_a_lane_with_less_before_it_starts_earlier() -> None:
    queue = new_queue()
    for number in range(100):
        order(queue, hash_of(number), FLOOD, "flood", number)
    last = hash_of(99)
    of_flood = queue.start_of(last, "flood", OrderPlace(ONE_SPACE, FLOOD, 10.0, index=99))
    assert of_flood == 99
    assert queue.start_of(last, "one", OrderPlace(ONE_SPACE, ONE, 20.0)) == 0
    assert queue.start_of(last, "other", OrderPlace(ONE_SPACE, FLOOD, 5.0)) == 0, "its deadline is nearer"


def test_of_a_flood_only_one_turn_comes_before_another_flow() -> None:
    queue = new_queue()
    for number in range(1000):
        order(queue, hash_of(number), FLOOD, f"flood-{number % 10}")
    assert queue.orders_ahead(ONE_SPACE, ONE, 50.0, 1) == OrdersAhead(1, 1)
    assert queue.orders_ahead(ONE_SPACE, ONE, 50.0, 3) == OrdersAhead(3, 3)
    assert queue.orders_ahead(ONE_SPACE, FLOOD, 50.0, 1) == OrdersAhead(1000, 10)
    assert queue.orders_ahead(ONE_SPACE, FLOOD, 5.0, 1) == OrdersAhead(0, 0), "its deadline is nearer"
    assert queue.orders_ahead(ONE_SPACE, BATCH, 50.0, 1) == OrdersAhead(MAX_PASSED, MAX_PASSED)
    assert queue.orders_ahead(OTHER_SPACE, ONE, 50.0, 1) == OrdersAhead(0, 0)
