"""Slots: bounds in all and per host, first come, first served, and nothing is left."""

import asyncio
from contextlib import suppress

from triptych_gateway.fetch.downloader import FetchSlots


async def test_bounds_hold_and_a_slow_host_keeps_no_other_waiting() -> None:
    slots = FetchSlots(3, 2)
    running: list[str] = []
    release = asyncio.Event()

    async def run(name: str) -> None:
        async with slots.hold(name[0]):
            running.append(name)
            await release.wait()

    async with asyncio.TaskGroup() as group:
        for name in ("a1", "a2", "a3", "b1", "b2"):
            group.create_task(run(name))
        for _ in range(5):
            await asyncio.sleep(0)
        assert running == ["a1", "a2", "b1"]  # a3: two of its host; b2: three in all
        release.set()
    assert sorted(running) == ["a1", "a2", "a3", "b1", "b2"]
    assert len(slots) == 0


async def test_one_that_leaves_while_it_waits_gives_its_place_on() -> None:
    slots = FetchSlots(1, 1)
    async with slots.hold("a"):
        waiting = asyncio.get_running_loop().create_task(_take(slots, "a"))
        other = asyncio.get_running_loop().create_task(_take(slots, "b"))
        await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        assert not other.done()
    await asyncio.wait_for(other, 60)
    assert len(slots) == 0


async def _take(slots: FetchSlots, host: str) -> None:
    async with slots.hold(host):
        pass
