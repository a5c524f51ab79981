"""A transport that fails is followed by the next one that both agents have: the order comes true."""

import asyncio

from tests.integration.cache_store.fabric.conftest import MakeHost
from tests.integration.cache_store.fabric.test_failures import DATA, HASH, SLOW
from tests.support.fabric.orders import OrderingGateway, completed, failed
from tests.support.fabric.transports import transports_option
from tests.support.faults.tcp_proxy import TcpProxy
from triptych_common.protocol.messages import FabricTransport
from triptych_common.protocol.transfers import TransferFailureKind

OTHER = f"{2:064x}"
ELSEWHERE = "127.0.0.2"  # nothing listens there


async def test_a_port_that_is_not_reached(make_host: MakeHost, gateway: OrderingGateway) -> None:
    """As behind a firewall: by Redis. The next transfer takes the link that there is."""
    source = make_host("a", transports_option("tcp", "redis"))
    target = make_host("b", transports_option("tcp", "redis"), f"--fabric-advertise-host={ELSEWHERE}")
    for mm_hash, data in ((HASH, DATA), (OTHER, DATA[::-1])):
        source.encode(mm_hash, data)
        result = completed(await gateway.transfer(source, target, mm_hash))
        assert result.transport is FabricTransport.REDIS
        assert await asyncio.to_thread(target.read, mm_hash) == data
    assert source.agent.log().count("fabric transport failed") == 1
    source.wait_no_leftovers()
    target.wait_no_leftovers()


async def test_a_link_that_is_lost_in_the_middle(make_host: MakeHost, gateway: OrderingGateway) -> None:
    """And cannot be made again: the same order comes true by the other transport."""
    both = transports_option("tcp", "redis")
    source = make_host("a", both, SLOW)
    target = make_host("b", both, f"--fabric-advertise-host={ELSEWHERE}")
    source.encode(HASH, DATA)
    with TcpProxy(target.port, host=ELSEWHERE, port=target.port) as proxy:
        result = await gateway.order(source, target, HASH)
        await target.wait_being_written(HASH)
        assert proxy.num_connections == 1
        await asyncio.to_thread(proxy.cut)
        assert completed(await asyncio.wait_for(result, 20)).transport is FabricTransport.REDIS
    assert (await asyncio.to_thread(target.pushes.wait_next, 10.0)).kind == "writer_lost"
    assert await asyncio.to_thread(target.wait_sealed, HASH) == DATA
    source.wait_no_leftovers()
    target.wait_no_leftovers()


async def test_where_there_is_no_other_one_the_order_fails(
    make_host: MakeHost, gateway: OrderingGateway
) -> None:
    source, target = make_host("a"), make_host("b", f"--fabric-advertise-host={ELSEWHERE}")
    source.encode(HASH, DATA)
    assert failed(await gateway.transfer(source, target, HASH)) is TransferFailureKind.UNREACHABLE
    source.wait_no_leftovers()
