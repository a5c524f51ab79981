"""A transport that fails is followed by the next one that both agents have: the order comes true."""

import asyncio

import pytest

from tests.integration.fabric.conftest import MakeHost, needs_nixl
from tests.integration.fabric.test_failures import DATA, HASH
from tests.support.fabric.orders import OrderingGateway, completed, failed
from tests.support.fabric.transports import transports_option
from triptych_common.protocol.messages import FabricTransport
from triptych_common.protocol.transfers import TransferFailureKind

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
