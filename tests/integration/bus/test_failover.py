"""A replica is promoted; the old primary becomes its replica, and answers READONLY."""

import asyncio
import contextlib
import queue
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from tests.conftest import EmbeddedRedis, embedded_redis, redis_server_binary
from tests.integration.bus.samples import LIMIT_S, STREAM, ids, message, take, take_queued
from tests.support.system import free_port, wait_until
from tests.support.tcp_proxy import TcpProxy, proxy_to
from triptych_common.bus import AsyncBus, BlobStore, ThreadedBus
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.codec import Envelope

FAST_REPLICATION = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")


@dataclass
class Pair:
    """A primary and its replica."""

    primary: EmbeddedRedis
    replica: EmbeddedRedis

    def fail_over(self) -> None:
        """Promote the replica, once it has everything; the old primary follows it."""
        with raw(self.primary) as old, raw(self.replica) as new:
            old.client_pause(10_000, all=False)  # no writes until it is a replica
            offset = old.info("replication")["master_repl_offset"]
            wait_until(
                lambda: new.info("replication")["slave_repl_offset"] >= offset, LIMIT_S, "replica has all"
            )
            new.execute_command("REPLICAOF", "NO", "ONE")
            old.execute_command("REPLICAOF", "127.0.0.1", self.replica.port)
            old.client_unpause()
        self.primary, self.replica = self.replica, self.primary


@contextlib.contextmanager
def raw(server: EmbeddedRedis) -> Iterator[Any]:
    client = redis.Redis.from_url(server.url)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with (
        embedded_redis(*FAST_REPLICATION, port=free_port()) as primary,
        embedded_redis(*FAST_REPLICATION, port=free_port()) as replica,
    ):
        with raw(replica) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", primary.port)
            wait_until(
                lambda: client.info("replication")["master_link_status"] == "up", LIMIT_S, "replica follows"
            )
        yield Pair(primary, replica)


@pytest.fixture
def address(pair: Pair) -> Iterator[TcpProxy]:
    """What clients know: it leads to the primary."""
    with proxy_to(pair.primary.port) as proxy:
        yield proxy


async def test_everything_goes_on_at_the_new_primary(pair: Pair, address: TcpProxy) -> None:
    async with (
        await AsyncBus.connect(address.url, "test", client_name="tests") as bus,
        bus.consumer(STREAM, group="g", consumer="c", prefetch=4) as consumer,
        asyncio.timeout(LIMIT_S),
    ):
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
    monkeypatch.setattr("triptych_common.bus.connection.COMMAND_LIMIT_S", 0.5)
    with proxy_to(pair.replica.port) as address:
        with pytest.raises(BusUnavailableError, match="takes no writes now"):
            await AsyncBus.connect(address.url, "test", client_name="tests")
        address.turn_to(pair.primary.port)
        async with await AsyncBus.connect(address.url, "test", client_name="tests") as bus:
            await bus.publish(STREAM, message(1))


def test_threaded_bus_goes_on_at_the_new_primary(pair: Pair, address: TcpProxy) -> None:
    received: queue.Queue[Envelope] = queue.Queue()
    bus = ThreadedBus(address.url, "test", client_name="tests")
    try:
        bus.subscribe(STREAM, group="g", consumer="c", callback=received.put)
        bus.publish(STREAM, message(1))
        assert take_queued(received, 1) == ids(1)
        pair.fail_over()
        bus.publish(STREAM, message(2))
        address.turn_to(pair.primary.port)
        assert take_queued(received, 1) == ids(2)
        assert bus.num_dropped == 0
    finally:
        bus.close()


@contextlib.contextmanager
def sentinel_of(primary: EmbeddedRedis, folder: Any) -> Iterator[int]:
    """One sentinel that may decide alone; its port."""
    port = free_port()
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor mymaster 127.0.0.1 {primary.port} 1\n"
        "sentinel down-after-milliseconds mymaster 300\nsentinel failover-timeout mymaster 1000\n"
    )
    log = folder / "sentinel.log"
    with log.open("wb") as output:
        process = subprocess.Popen([redis_server_binary(), str(config), "--sentinel"], stdout=output)
    client = redis.Redis(port=port)
    try:
        wait_until(lambda: _knows_a_replica(client), LIMIT_S, "sentinel knows the replica")
        yield port
    finally:
        client.close()
        process.kill()
        process.wait(10)


def _knows_a_replica(client: Any) -> bool:
    try:
        return bool(client.sentinel_slaves("mymaster"))
    except redis.ConnectionError:
        return False


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
