"""The command line lists a real store's entries and the registered instances."""

import asyncio
from collections.abc import Callable

import redis

from tests.conftest import EmbeddedRedis
from tests.support.stores import StoreProcess
from triptych_cli.commands.clients import list_entries
from triptych_cli.supervisor.readiness import RegistryReader
from triptych_common.protocol.store import MAX_LISTED, Reserve, Reserved, Seal, TensorSpec
from triptych_common.store_session import AsyncStoreSession

BLOCK = 4096
SPEC = TensorSpec(shape=(1, 1), dtype="bfloat16", num_bytes=2)
NUM_ENTRIES = 2 * MAX_LISTED + 100


async def test_all_entries_are_listed(make_daemon: Callable[..., StoreProcess]) -> None:
    daemon = make_daemon(region_bytes=2 * NUM_ENTRIES * BLOCK, block_bytes=BLOCK)
    wanted = {f"{number:064x}" for number in range(NUM_ENTRIES)}
    async with await AsyncStoreSession.connect(str(daemon.socket), "tester/one") as session:

        async def put(mm_hash: str) -> None:
            reserved = await session.request(Reserve(seq=0, mm_hash=mm_hash, spec=SPEC))
            assert isinstance(reserved, Reserved)
            await session.request(Seal(seq=0, reservation_id=reserved.reservation_id))

        await asyncio.gather(*(put(each) for each in wanted))
        listed = [each.mm_hash for each in await list_entries(session)]
        assert listed == sorted(wanted)
        assert [each.mm_hash for each in await list_entries(session, MAX_LISTED + 7)] == listed[
            : MAX_LISTED + 7
        ]


async def test_the_reader_keeps_its_connection_and_survives_its_loss(own_redis: EmbeddedRedis) -> None:
    async with RegistryReader(own_redis.url, "default") as reader:
        assert await reader.list_instances() == []
        with redis.Redis.from_url(own_redis.url) as client:
            before = client.info("stats")["total_connections_received"]
            assert await reader.list_instances() == []
            assert client.info("stats")["total_connections_received"] == before
        own_redis.stop()
        assert await reader.list_instances() is None
        own_redis.start()
        assert await reader.list_instances() == []
