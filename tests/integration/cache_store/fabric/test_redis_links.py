"""Agents that reach each other through Redis alone: whoever has Redis and not the key writes nothing, what
stands there is bounded, nothing of it stays.
"""

import asyncio
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.conftest import EmbeddedRedis, embedded_redis
from tests.integration.cache_store.fabric.conftest import MakeHost
from tests.integration.cache_store.fabric.test_authentication import Authority
from tests.support.fabric.orders import OrderingGateway, completed, failed
from tests.support.fabric.transports import transports_option
from tests.support.waiting import until_async, wait_until
from triptych_cache_store.fabric.wire.redis_channel import WINDOW_BYTES
from triptych_common.protocol.names import StreamNames
from triptych_common.protocol.transfers import LinkCall, TransferFailureKind

MIB = 1 << 20
HASH, OTHER = f"{1:064x}", f"{2:064x}"
DATA = random.Random(1).randbytes(6 * MIB)
SLOW = f"--fabric-max-rate={2 * MIB}"  # a transfer of DATA takes three seconds
NAMES = StreamNames("test")


@pytest.fixture
def transport() -> str:
    return "redis"


@pytest.fixture
def own_redis() -> Iterator[EmbeddedRedis]:
    """Of one test; what it has outlives its end."""
    with embedded_redis(keeps_data=True) as server:
        yield server


@pytest.fixture
def redis_url(own_redis: EmbeddedRedis) -> str:
    return own_redis.url


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def link_keys(raw: Any, reader: str = "*") -> list[str]:
    return [key.decode() for key in raw.scan_iter(NAMES.link("*", reader))]


async def wait_no_links(raw: Any) -> None:
    async def is_empty() -> bool:
        return not await asyncio.to_thread(link_keys, raw)

    await until_async(is_empty, 15.0)


async def test_nothing_listens_and_nothing_stays(
    make_host: MakeHost, gateway: OrderingGateway, raw: Any
) -> None:
    source, target = make_host("a"), make_host("b")
    source.encode(HASH, DATA)
    assert completed(await gateway.transfer(source, target, HASH)).transport == "redis"
    assert await asyncio.to_thread(target.read, HASH) == DATA
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", target.port))
    endpoints = [each.fabric for each in await gateway.list_instances() if each.fabric is not None]
    assert [(each.host, each.port) for each in endpoints] == [(None, None)] * 2
    assert len(link_keys(raw)) == 2
    assert await asyncio.to_thread(source.agent.stop) == 0
    await wait_no_links(raw)


async def test_the_first_transport_that_both_have(make_host: MakeHost, gateway: OrderingGateway) -> None:
    source = make_host("a", transports_option("redis", "tcp"))
    targets = [make_host("b", transports_option("tcp", "redis")), make_host("c", transports_option("tcp"))]
    source.encode(HASH, b"ab")
    came = [completed(await gateway.transfer(source, target, HASH)).transport for target in targets]
    assert came == ["redis", "tcp"]
    target = make_host("d")  # redis alone
    targets[1].encode(OTHER, b"ab")
    assert failed(await gateway.transfer(targets[1], target, OTHER)) is TransferFailureKind.REFUSED


async def test_a_target_that_hangs_bounds_what_is_in_redis(
    make_host: MakeHost, gateway: OrderingGateway, raw: Any
) -> None:
    source, target = make_host("a", "--fabric-progress-timeout-s=4"), make_host("b")
    source.encode(HASH, b"ab")
    completed(await gateway.transfer(source, target, HASH))
    (stream,) = link_keys(raw, "target")
    source.encode(OTHER, random.Random(2).randbytes(32 * MIB))
    result = await gateway.order(source, target, OTHER)
    await target.wait_being_written(OTHER)
    target.agent.send_signal(signal.SIGSTOP)
    seen = [0]

    def is_over() -> bool:
        seen.append(sum(len(fields[b"e"]) for _, fields in raw.xrange(stream)))
        return result.done()

    await until_async(lambda: asyncio.to_thread(is_over), 20.0)
    assert max(seen) <= WINDOW_BYTES
    target.agent.send_signal(signal.SIGCONT)
    await wait_no_links(raw)


async def test_redis_away_for_a_while(
    make_host: MakeHost, gateway: OrderingGateway, own_redis: EmbeddedRedis, raw: Any
) -> None:
    source, target = make_host("a", SLOW), make_host("b")
    source.encode(HASH, DATA)
    result = await gateway.order(source, target, HASH)
    await target.wait_being_written(HASH)
    await asyncio.to_thread(own_redis.stop)
    lost = await asyncio.to_thread(target.pushes.wait_next, 10.0)
    assert lost.kind == "writer_lost", "nothing stays reserved meanwhile"
    await asyncio.to_thread(own_redis.start)
    assert failed(await asyncio.wait_for(result, 15)) is TransferFailureKind.UNREACHABLE
    completed(await gateway.transfer(source, target, HASH))
    assert await asyncio.to_thread(target.read, HASH) == DATA
    source.wait_no_leftovers()
    assert len(link_keys(raw)) <= 4
    await asyncio.to_thread(source.agent.stop)
    await wait_no_links(raw)


async def test_who_has_redis_alone_writes_nothing(
    make_host: MakeHost, gateway: OrderingGateway, raw: Any
) -> None:
    """A frame in the middle of an entry: the link ends, and nothing is sealed."""
    source, target = make_host("a", SLOW), make_host("b")
    source.encode(HASH, DATA)
    result = await gateway.order(source, target, HASH)
    await target.wait_being_written(HASH)
    (stream,) = link_keys(raw, "target")
    raw.xadd(stream, {b"e": bytes(9) + b"\2" + bytes(15) + b"evil" * 4 + bytes(32)})
    assert failed(await asyncio.wait_for(result, 15)) is TransferFailureKind.UNREACHABLE
    # The sending agent may hear of the end before the receiving one has given its reservation up.
    wait_until(lambda: target.store.stats().num_reservations == 0, 15, "nothing is reserved at the target")
    assert target.store.stats().num_seals_total == 0
    source.wait_no_leftovers()


async def test_calls_of_strangers_cost_little(make_host: MakeHost, gateway: OrderingGateway) -> None:
    """Links that nobody has made, and more than it takes; then it takes others again."""
    source, target = make_host("a"), make_host("b")
    bus = gateway.bus
    for number in range(50):
        call = LinkCall(link_id=f"{number:032x}", source="store-evil")
        await bus.publish(NAMES.link_calls(target.agent.instance), call, remaining_ms=5000)
    source.encode(HASH, b"ab")
    completed(await gateway.transfer(source, target, HASH))
    assert target.store.stats().num_seals_total == 1


def test_certificates_alone_are_not_enough(run_dir: Path, redis_url: str) -> None:
    options = Authority(run_dir, "fabric").options("a")
    ended = subprocess.run(
        [
            sys.executable, "-m", "triptych_cache_store", "fabric", f"--run-dir={run_dir}",
            f"--redis-url={redis_url}", transports_option("redis"), *options,
        ],
        capture_output=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert b"needs FABRIC_KEY_FILE" in ended.stderr
