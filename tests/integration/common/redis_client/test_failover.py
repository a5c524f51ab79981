"""A replica is promoted; the old primary becomes its replica, and answers READONLY."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.common.samples import (
    LIMIT_S,
    STREAM,
    consuming_bus,
    ids,
    message,
    reading_bus,
    take,
    take_queued,
)
from tests.support.faults.redis_pair import Pair, raw, running_pair, sentinel_of
from tests.support.faults.tcp_proxy import TcpProxy, proxy_to
from tests.support.waiting import free_port
from triptych_common.bus import AsyncBus
from triptych_common.coordination import BlobStore
from triptych_common.domain.errors import BusUnavailableError


@pytest.fixture
def pair() -> Iterator[Pair]:
    with running_pair() as running:
        yield running


@pytest.fixture
def address(pair: Pair) -> Iterator[TcpProxy]:
    """What clients know: it leads to the primary."""
    with proxy_to(pair.primary.port) as proxy:
        yield proxy


async def test_everything_goes_on_at_the_new_primary(pair: Pair, address: TcpProxy) -> None:
    async with consuming_bus(address.url, prefetch=4) as (bus, consumer):
        changed = asyncio.Event()
        bus.on_server_changed(changed.set)
        await bus.publish(STREAM, message(1))
        held = await anext(consumer)
        await bus.publish(STREAM, message(2))
        await asyncio.to_thread(pair.fail_over)
        address.turn_to(pair.primary.port)  # connections to the old one stay: READONLY ends them
        await bus.publish(STREAM, message(3))
        assert await take(consumer, 2) == ids(2, 3)
        await held.ack()
        assert changed.is_set()
        with raw(pair.primary) as client:
            assert client.xlen(STREAM) == 0
            assert client.xpending(STREAM, "g")["pending"] == 0


async def test_a_replica_is_an_error_until_the_address_leads_elsewhere(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych_common.redis_client.commands.COMMAND_LIMIT_S", 0.5)
    with proxy_to(pair.replica.port) as address:
        with pytest.raises(BusUnavailableError, match="takes no writes now"):
            await AsyncBus.connect(address.url, "test", client_name="tests")
        address.turn_to(pair.primary.port)
        async with await AsyncBus.connect(address.url, "test", client_name="tests") as bus:
            await bus.publish(STREAM, message(1))


def test_threaded_bus_goes_on_at_the_new_primary(pair: Pair, address: TcpProxy) -> None:
    with reading_bus(address.url) as (bus, received):
        bus.publish(STREAM, message(1))
        assert take_queued(received, 1) == ids(1)
        pair.fail_over()
        bus.publish(STREAM, message(2))
        address.turn_to(pair.primary.port)
        assert take_queued(received, 1) == ids(2)
        assert bus.num_dropped == 0


async def test_sentinels_name_the_new_primary(pair: Pair, tmp_path: Any) -> None:
    with sentinel_of(pair.primary, tmp_path) as port:
        url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/mymaster/0"  # the first is down
        async with (
            await AsyncBus.connect(url, "test", client_name="tests") as bus,
            bus.consumer(STREAM, group="g", consumer="c") as consumer,
            asyncio.timeout(2 * LIMIT_S),
        ):
            changed = asyncio.Event()
            bus.on_server_changed(changed.set)
            await bus.publish(STREAM, message(1))
            assert await take(consumer, 1) == ids(1)
            taking = asyncio.ensure_future(anext(consumer))
            await asyncio.to_thread(pair.primary.stop)
            await changed.wait()
            await bus.publish(STREAM, message(2))
            delivery = await taking
            assert delivery.envelope.message == message(2)
        with raw(pair.replica) as client:
            assert client.info("replication")["role"] == "master"


def test_tensors_go_on_at_the_new_primary(pair: Pair, address: TcpProxy) -> None:
    blobs = BlobStore(address.url, "test", client_name="tests")
    blobs.put("a", memoryview(b"one"))
    pair.fail_over()
    with pytest.raises(BusUnavailableError, match="read only"):
        blobs.put("b", memoryview(b"two"))
    address.turn_to(pair.primary.port)
    blobs.put("b", memoryview(b"two"))
    assert (blobs.get("a", 3), blobs.get("b", 3)) == (b"one", b"two")
    blobs.close()


def test_sentinels_name_the_primary_for_tensors(pair: Pair, tmp_path: Any) -> None:
    with sentinel_of(pair.primary, tmp_path) as port:
        url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/mymaster/0"
        blobs = BlobStore(url, "test", client_name="tests")
        blobs.put("a", memoryview(b"one"))
        with raw(pair.primary) as client:
            assert client.keys() == [b"triptych:test:tensor:a"]
        blobs.close()


async def test_a_service_that_sentinels_do_not_know(pair: Pair, tmp_path: Any) -> None:
    with (
        sentinel_of(pair.primary, tmp_path) as port,
        pytest.raises(BusUnavailableError, match="No master found for 'other'"),
    ):
        await AsyncBus.connect(f"redis+sentinel://127.0.0.1:{port}/other", "test", client_name="tests")
