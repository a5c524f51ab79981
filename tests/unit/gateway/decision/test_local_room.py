"""Requests wait in turns for room at the instance that encodes them."""

import asyncio
import math

import pytest

from triptych_common.domain.fair_queue import FairKey
from triptych_gateway.decision.instance_load import NUM_PLACES, LocalPlace, LocalRoom
from triptych_gateway.errors import EncodeUnavailableError

FLOOD, ALONE = FairKey(flow="flood"), FairKey(flow="alone")


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def filled(room: LocalRoom) -> list[LocalPlace]:
    return [await room.take_place("pd-0", FLOOD, math.inf) for _ in range(NUM_PLACES)]


async def test_a_place_that_is_left_goes_to_the_next_one_and_flows_take_turns() -> None:
    room = LocalRoom()
    assert not room.is_full("pd-0")
    places = await filled(room)
    assert room.is_full("pd-0")
    assert not room.is_full("pd-1")
    let_in: list[FairKey] = []

    async def wait(fair_key: FairKey, until: asyncio.Event) -> None:
        await room.take_place("pd-0", fair_key, math.inf)
        let_in.append(fair_key)
        await until.wait()

    end = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for fair_key in [FLOOD] * 5 + [ALONE]:
            group.create_task(wait(fair_key, end))
        await settle()
        assert (let_in, room.num_held("pd-0")) == ([], 6)
        places[0].leave()
        places[0].leave()  # a second time is none
        await settle()
        assert let_in == [ALONE]
        places[1].leave()
        await settle()
        assert let_in == [ALONE, FLOOD]
        assert room.num_requests("pd-0") == NUM_PLACES + 4
        for place in places[2:]:
            place.leave()
        await settle()
        assert room.num_held("pd-0") == 0
        end.set()
    await settle()
    assert room.num_requests("pd-0") == 0, "places end with the tasks that took them"


async def test_what_goes_away_takes_no_place_along() -> None:
    room = LocalRoom()
    places = await filled(room)
    first, second = (asyncio.create_task(room.take_place("pd-0", FLOOD, math.inf)) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    places[0].leave()
    await settle()
    assert second.done()
    third = asyncio.create_task(room.take_place("pd-0", FLOOD, math.inf))
    await settle()
    places[1].leave()
    third.cancel()  # while its place is on the way
    await settle()
    for place in places:
        place.leave()
    await settle()
    assert room.num_requests("pd-0") == 0


async def test_the_deadline_ends_the_wait() -> None:
    room = LocalRoom()
    await filled(room)
    with pytest.raises(EncodeUnavailableError) as caught:
        await room.take_place("pd-0", FLOOD, 0.0)
    assert caught.value.code == "deadline_exceeded"


async def test_what_waits_no_more_costs_its_flow_no_turn_and_leaves_nothing() -> None:
    room = LocalRoom()
    places = await filled(room)
    gone = [asyncio.create_task(room.take_place("pd-0", ALONE, math.inf)) for _ in range(3)]
    await settle()
    for each in gone:
        each.cancel()
    await settle()
    assert room.num_held("pd-0") == 0
    let_in: list[FairKey] = []

    async def wait(fair_key: FairKey) -> None:
        await room.take_place("pd-0", fair_key, math.inf)
        let_in.append(fair_key)

    async with asyncio.TaskGroup() as group:
        for fair_key in (FLOOD, ALONE):
            group.create_task(wait(fair_key))
        await settle()
        places[0].leave()
    assert let_in == [ALONE, FLOOD]


async def test_instances_without_requests_are_forgotten() -> None:
    room = LocalRoom()
    held = await room.take_place("held", FLOOD, math.inf)
    for number in range(10):
        (await room.take_place(f"pod-{number}", FLOOD, math.inf)).leave()
    assert len(room._instances) <= 2
    assert room.num_requests("held") == 1
    held.leave()
