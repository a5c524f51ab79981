"""What breaks in the middle of a transfer: the gateway is told in time, and nothing stays held anywhere."""

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.fabric.conftest import (
    MakeHost,
    by_each_transport,
    by_each_transport_in_time,
    needs_nixl,
)
from tests.support.fabric.fabric_host import transports_option
from tests.support.fabric.orders import OrderingGateway, completed, failed
from tests.support.faults.redis_pair import Pair, running_pair, sentinel_of
from tests.support.waiting import until_async
from triptych_common.protocol.messages import EncodeClass, FabricTransport
from triptych_common.protocol.transfers import TransferFailureKind

MIB = 1 << 20
HASH = f"{1:064x}"
DATA = random.Random(1).randbytes(6 * MIB)
SLOW = f"--fabric-max-rate={2 * MIB}"  # a transfer of DATA takes three seconds


async def test_target_killed(make_host: MakeHost, gateway: OrderingGateway) -> None:
    source, target = make_host("a", SLOW), make_host("b")
    source.encode(HASH, DATA)
    result = await gateway.order(source, target, HASH)
    await target.wait_being_written(HASH)
    target.kill_agent()
    assert failed(await asyncio.wait_for(result, 10)) is TransferFailureKind.UNREACHABLE
    lost = await asyncio.to_thread(target.pushes.wait_next, 10.0)
    assert lost.kind == "writer_lost"
    assert target.store.stats().num_reservations == 0
    source.wait_no_leftovers()
    await asyncio.to_thread(target.agent.start)
    completed(await gateway.transfer(source, target, HASH))
    assert await asyncio.to_thread(target.wait_sealed, HASH) == DATA


@by_each_transport_in_time
async def test_source_killed(make_host: MakeHost, gateway: OrderingGateway) -> None:
    """Watchers at the target learn it; the agent that comes back finds the order again."""
    source, target = make_host("a", SLOW), make_host("b")
    source.encode(HASH, DATA)
    result = await gateway.order(source, target, HASH)
    await target.wait_being_written(HASH)
    source.kill_agent()
    lost = await asyncio.to_thread(target.pushes.wait_next, 10.0)
    assert lost.kind == "writer_lost"
    assert target.store.stats().writing_num_bytes == 0
    source.wait_no_leftovers()
    await asyncio.to_thread(source.agent.start)
    completed(await asyncio.wait_for(result, 20))
    assert await asyncio.to_thread(target.wait_sealed, HASH) == DATA


@by_each_transport
async def test_target_stops(make_host: MakeHost, gateway: OrderingGateway) -> None:
    source, target = make_host("a", SLOW), make_host("b")
    source.encode(HASH, DATA)
    result = await gateway.order(source, target, HASH)
    await target.wait_being_written(HASH)
    target.agent.send_signal(signal.SIGSTOP)
    assert failed(await asyncio.wait_for(result, 10)) is TransferFailureKind.UNREACHABLE
    source.wait_no_leftovers()
    target.agent.send_signal(signal.SIGCONT)
    lost = await asyncio.to_thread(target.pushes.wait_next, 10.0)
    assert lost.kind == "writer_lost"
    completed(await gateway.transfer(source, target, HASH))


@by_each_transport
async def test_source_stops(make_host: MakeHost, gateway: OrderingGateway) -> None:
    source, target = make_host("a", SLOW), make_host("b")
    source.encode(HASH, DATA)
    result = await gateway.order(source, target, HASH)
    await target.wait_being_written(HASH)
    source.agent.send_signal(signal.SIGSTOP)
    lost = await asyncio.to_thread(target.pushes.wait_next, 10.0)
    assert lost.kind == "writer_lost"
    source.agent.send_signal(signal.SIGCONT)
    assert failed(await asyncio.wait_for(result, 15)) is TransferFailureKind.UNREACHABLE
    source.wait_no_leftovers()


@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_store_restarts(make_host: MakeHost, gateway: OrderingGateway, side: str) -> None:
    """A crash that the session bridges. The source's goes unseen; at the target the links begin anew."""
    source, target = make_host("a", SLOW), make_host("b")
    source.encode(HASH, DATA)
    result = await gateway.order(source, target, HASH)
    await target.wait_being_written(HASH)
    host = source if side == "source" else target
    generation = host.session.welcome.generation
    await asyncio.to_thread(host.store.stop, signal.SIGKILL)
    await asyncio.to_thread(host.store.start)
    outcome = await asyncio.wait_for(result, 15)
    if side == "source":
        completed(outcome)
    else:
        assert failed(outcome) is TransferFailureKind.UNREACHABLE
        completed(await gateway.transfer(source, target, HASH))
        assert host.session.welcome.generation > generation
    assert await asyncio.to_thread(target.read, HASH) == DATA
    source.wait_no_leftovers()


async def test_the_own_store_is_replaced(make_host: MakeHost, gateway: OrderingGateway) -> None:
    """Another region: what the agent held is gone, so it ends, to be started again."""
    source, target = make_host("a", SLOW), make_host("b")
    source.encode(HASH, DATA)
    await gateway.order(source, target, HASH)
    await target.wait_being_written(HASH)
    await asyncio.to_thread(target.store.stop)  # a clean end removes the region
    await asyncio.to_thread(target.store.start)
    process = target.agent.process
    assert process is not None
    assert await asyncio.to_thread(process.wait, 15) == 1
    assert "the cache store went away" in target.agent.log()
    assert target.store.stats().num_reservations == 0


async def test_a_drain_finishes_what_runs(make_host: MakeHost, gateway: OrderingGateway) -> None:
    source, target = make_host("a", SLOW), make_host("b")
    source.encode(HASH, DATA)
    result = await gateway.order(source, target, HASH)
    await target.wait_being_written(HASH)
    assert await asyncio.to_thread(source.agent.stop) == 0
    completed(await asyncio.wait_for(result, 60))
    assert "fabric-a" not in {each.instance for each in await gateway.list_instances()}


async def test_a_drain_is_bounded(make_host: MakeHost, gateway: OrderingGateway) -> None:
    source, target = make_host("a", SLOW, "--drain-timeout-s=0.2"), make_host("b")
    source.encode(HASH, DATA)
    result = await gateway.order(source, target, HASH)
    await target.wait_being_written(HASH)
    assert await asyncio.to_thread(source.agent.stop) == 0
    assert failed(await asyncio.wait_for(result, 60)) is TransferFailureKind.UNREACHABLE
    source.wait_no_leftovers()


async def test_urgent_entries_pass_a_long_one(make_host: MakeHost, gateway: OrderingGateway) -> None:
    source, target = make_host("a", SLOW), make_host("b")
    source.encode(HASH, DATA)
    small = f"{2:064x}"
    source.encode(small, b"ab" * 1000)
    long = await gateway.order(source, target, HASH, encode_class=EncodeClass.BATCH)
    await target.wait_being_written(HASH)
    urgent = await gateway.order(source, target, small)
    completed(await asyncio.wait_for(urgent, 10))
    assert not long.done()
    completed(await asyncio.wait_for(long, 20))


OTHER = f"{2:064x}"
ELSEWHERE = "127.0.0.2"  # nothing listens there


@needs_nixl
@pytest.mark.long  # agents with NIXL take seconds to start
async def test_tcp_follows_nixl_without_a_network(
    make_host: MakeHost, gateway: OrderingGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next transfer takes the link that there is."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "nothing0")
    both = transports_option("nixl", "tcp")
    source, target = make_host("a", both), make_host("b", both)
    for mm_hash, data in ((HASH, DATA), (OTHER, DATA[::-1])):
        source.encode(mm_hash, data)
        result = completed(await gateway.transfer(source, target, mm_hash))
        assert result.transport is FabricTransport.TCP
        assert await asyncio.to_thread(target.read, mm_hash) == data
    assert source.agent.log().count("fabric transport failed") == 1
    source.wait_no_leftovers()
    target.wait_no_leftovers()


async def test_where_there_is_no_other_one_the_order_fails(
    make_host: MakeHost, gateway: OrderingGateway
) -> None:
    source, target = make_host("a"), make_host("b", f"--fabric-advertise-host={ELSEWHERE}")
    source.encode(HASH, DATA)
    assert failed(await gateway.transfer(source, target, HASH)) is TransferFailureKind.UNREACHABLE
    source.wait_no_leftovers()


# ---- a sentinel tells agents and a gateway which Redis is the primary ----------------------------
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
