"""A sentinel tells agents and a gateway which Redis is the primary: transfers go on at a new one."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.fabric.conftest import MakeHost
from tests.integration.fabric.test_failures import DATA, HASH, SLOW
from tests.support.fabric.orders import OrderingGateway, completed
from tests.support.faults.redis_pair import Pair, running_pair, sentinel_of
from tests.support.waiting import until_async

OTHER = f"{2:064x}"
LIMIT_S = 90.0
AGENTS = {"fabric-a", "fabric-b"}


@pytest.fixture
def pair() -> Iterator[Pair]:
    with running_pair() as running:
        yield running


@pytest.fixture
def redis_url(pair: Pair, run_dir: Path) -> Iterator[str]:
    with sentinel_of(pair.primary, run_dir) as port:
        yield f"redis+sentinel://127.0.0.1:{port}/mymaster/0"


async def lose_the_primary(pair: Pair, gateway: OrderingGateway) -> None:
    """Return when the gateway has the new one."""
    changed = asyncio.Event()
    gateway.bus.on_server_changed(changed.set)
    await asyncio.to_thread(pair.primary.stop)
    await asyncio.wait_for(changed.wait(), LIMIT_S)


async def test_an_entry_gets_to_another_store_before_and_after(
    make_host: MakeHost, gateway: OrderingGateway, pair: Pair
) -> None:
    source, target = make_host("a"), make_host("b")
    source.encode(HASH, DATA)
    source.encode(OTHER, DATA[::-1])
    assert completed(await gateway.transfer(source, target, HASH)).transport == "tcp"
    await lose_the_primary(pair, gateway)

    async def are_registered() -> bool:
        return {each.instance for each in await gateway.list_instances()} >= AGENTS

    await until_async(are_registered, LIMIT_S)
    assert completed(await gateway.transfer(source, target, OTHER)).transport == "tcp"
    assert await asyncio.to_thread(target.read, OTHER) == DATA[::-1]
    source.wait_no_leftovers()
    target.wait_no_leftovers()


async def test_a_transfer_that_is_under_way(
    make_host: MakeHost, gateway: OrderingGateway, pair: Pair
) -> None:
    """Its bytes need no Redis; its result is told by the new one."""
    source, target = make_host("a", SLOW), make_host("b")
    source.encode(HASH, DATA)
    result = await gateway.order(source, target, HASH)
    await target.wait_being_written(HASH)
    await lose_the_primary(pair, gateway)
    assert completed(await asyncio.wait_for(result, LIMIT_S)).num_bytes == len(DATA)
    assert await asyncio.to_thread(target.wait_sealed, HASH) == DATA
    source.wait_no_leftovers()
    target.wait_no_leftovers()
