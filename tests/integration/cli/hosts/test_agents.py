"""What real agents tell of their stores and links, which `status` and `drain` go by; and a real move."""

import asyncio
import time

from tests.integration.fabric.conftest import MakeHost, key_file, make_host, transport
from tests.support.fabric.fabric_host import FabricHost
from tests.support.waiting import until_async
from triptych_cli.commands.hosts.host_report import links_of
from triptych_cli.commands.hosts.mover import Mover, note_places, plan_moves, target_rooms
from triptych_common.bus import AsyncBus
from triptych_common.coordination import EntryDirectory, Registry
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import InstanceRecord
from triptych_common.protocol.store import Entries, ListEntries

__all__ = ["key_file", "make_host", "transport"]  # fixtures

NUM_BYTES = 1 << 20


async def entries_of(host: FabricHost) -> Entries:
    reply = await asyncio.to_thread(lambda: host.session.request(ListEntries(seq=0, limit=1000)))
    assert isinstance(reply, Entries)
    return reply


async def test_entries_move_to_where_there_is_room_and_the_record_tells(
    make_host: MakeHost, redis_url: str
) -> None:
    source = await asyncio.to_thread(make_host, "a")
    target = await asyncio.to_thread(lambda: make_host("b", region_bytes=8 << 20))
    data = {f"{number:064x}": bytes([number]) * NUM_BYTES for number in range(1, 13)}
    for mm_hash, content in data.items():
        await asyncio.to_thread(source.encode, mm_hash, content)
    async with await AsyncBus.connect(redis_url, "test", client_name="tests") as bus:
        registry = Registry(bus)

        async def agent_of(store: str) -> InstanceRecord:
            (found,) = [each for each in await registry.list_instances() if each.store == store]
            return found

        async def is_told() -> bool:
            load, other = (await agent_of("store-a")).fabric_load, (await agent_of("store-b")).fabric_load
            return load is not None and load.num_entries == len(data) and other is not None

        await until_async(is_told)
        load = (await agent_of("store-b")).fabric_load
        assert load is not None
        assert load.free_num_bytes <= 8 << 20

        plan = plan_moves(
            (await entries_of(source)).entries, target_rooms(await registry.list_instances(), "store-a")
        )
        assert plan.without_room
        assert len(plan.moves) + len(plan.without_room) == len(data)
        mover = Mover(bus, "fabric-a", "store-a", lambda results: None)
        await mover.move(plan.moves, time.monotonic() + 60.0)
        assert mover.results.failures == {}
        assert mover.results.num_bytes == len(plan.moves) * NUM_BYTES
        for move in plan.moves:
            assert await asyncio.to_thread(target.read, move.mm_hash) == data[move.mm_hash]
        assert target.store.stats().num_evictions_total == 0, "nothing was pushed out"

        records = await registry.list_instances()
        await note_places(bus, plan.moves, mover.results.moved, records)
        directory = EntryDirectory(bus, max_items=100, ttl_s=60.0)
        places = await directory.find([MmHash(each) for each in data])
        assert set(places) == set(mover.results.moved), "what was moved, and no more"
        ((place,),) = set(places.values())
        generation = target.session.welcome.generation
        assert (place.store, place.generation, place.num_bytes) == ("store-b", generation, NUM_BYTES)

        async def is_counted() -> bool:
            links = links_of([await agent_of("store-a")])
            return bool(links) and links[0][1].num_bytes == mover.results.num_bytes

        await until_async(is_counted)
        ((_, link),) = links_of([await agent_of("store-a")])
        assert (link.target, link.is_up, link.failure) == ("store-b", True, None)
        assert link.bytes_per_s is not None

        await asyncio.to_thread(target.kill_agent)

        async def is_down() -> bool:
            return not links_of([await agent_of("store-a")])[0][1].is_up

        await until_async(is_down)
