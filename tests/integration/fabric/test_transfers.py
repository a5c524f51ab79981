"""Entries go from one store to another: two real stores, two real agents, a real Redis."""

import asyncio
import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import embedded_redis
from tests.integration.conftest import SHARED_MEMORY
from tests.integration.fabric.conftest import ALL_TRANSPORTS
from tests.support.fabric.agent_process import write_fabric_key
from tests.support.fabric.fabric_host import FabricHost, transports_option
from tests.support.fabric.orders import OrderingGateway, completed, failed
from tests.support.waiting import free_port, until_async
from triptych_common.protocol.store import Watching
from triptych_common.protocol.transfers import TransferFailureKind

Pair = tuple[FabricHost, FabricHost]
Make = Callable[..., FabricHost]
MIB = 1 << 20


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """Of this module alone: its agents live as long."""
    with embedded_redis() as server:
        yield server.url


@pytest.fixture(scope="module", params=ALL_TRANSPORTS)
def shared_transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def make_shared(redis_url: str, shared_transport: str) -> Iterator[Make]:
    with contextlib.ExitStack() as stack:
        directory = tempfile.TemporaryDirectory(prefix="triptych-test-", dir=SHARED_MEMORY)
        run_dir = Path(stack.enter_context(directory))
        options = (
            f"--fabric-key-file={write_fabric_key(run_dir / 'key')}",
            "--fabric-progress-timeout-s=2",
            transports_option(shared_transport),
        )

        def make(name: str, region_bytes: int) -> FabricHost:
            host = FabricHost(
                run_dir / name, redis_url, name, free_port(), *options, region_bytes=region_bytes
            )
            stack.callback(host.close)
            host.start()
            return host

        yield make


@pytest.fixture(scope="module")
def shared_pair(make_shared: Make) -> Pair:
    return make_shared("a", 256 * MIB), make_shared("b", 256 * MIB)


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    """A source and a target, empty."""
    for host in shared_pair:
        host.reset()
    return shared_pair


@pytest.fixture(scope="module")
def small(make_shared: Make) -> FabricHost:
    """A target with a small store."""
    return make_shared("small", 4 * MIB)


def hash_of(number: int) -> str:
    return f"{number:064x}"


def bytes_of(number: int, num_bytes: int) -> bytes:
    return random.Random(number).randbytes(num_bytes)


async def test_a_sealed_entry(pair: Pair, gateway: OrderingGateway, shared_transport: str) -> None:
    source, target = pair
    data = bytes_of(1, 3 * MIB + 2)
    source.encode(hash_of(1), data)
    result = completed(await gateway.transfer(source, target, hash_of(1)))
    assert result.num_bytes == len(data)
    assert result.transfer_s > 0
    assert result.transport == shared_transport
    assert target.read(hash_of(1)) == data
    source.wait_no_leftovers()
    target.wait_no_leftovers()


async def test_pushed_before_the_seal(pair: Pair, gateway: OrderingGateway) -> None:
    """The target's consumer finds the entry being written before the encoder has sealed it."""
    source, target = pair
    data = bytes_of(2, MIB)
    reserved = source.reserve(hash_of(2), len(data))
    result = await gateway.order(source, target, hash_of(2))
    await until_async(lambda: asyncio.to_thread(target.is_being_written, hash_of(2)), 10.0)
    assert not result.done()
    source.seal(reserved, data)
    assert await asyncio.to_thread(target.wait_sealed, hash_of(2)) == data
    completed(await asyncio.wait_for(result, 10))
    source.wait_no_leftovers()
    target.wait_no_leftovers()


@pytest.mark.parametrize("num_bytes", [2, 4096, MIB - 2, MIB, MIB + 2, 16 * MIB])
async def test_sizes(pair: Pair, gateway: OrderingGateway, num_bytes: int) -> None:
    source, target = pair
    data = bytes_of(num_bytes, num_bytes)
    source.encode(hash_of(3), data)
    completed(await gateway.transfer(source, target, hash_of(3)))
    assert target.read(hash_of(3)) == data


async def test_many_at_once(pair: Pair, gateway: OrderingGateway) -> None:
    source, target = pair
    sizes = [2 * random.Random(number).choice([1, 50, 5_000, 500_000, 2_000_000]) for number in range(60)]
    sizes.append(64 * MIB)
    for number, num_bytes in enumerate(sizes):
        source.encode(hash_of(number), bytes_of(number, num_bytes))
    futures = [await gateway.order(source, target, hash_of(number)) for number in range(len(sizes))]
    for future in futures:
        completed(await asyncio.wait_for(future, 40))
    for number, num_bytes in enumerate(sizes):
        assert target.read(hash_of(number)) == bytes_of(number, num_bytes), number
    source.wait_no_leftovers()
    target.wait_no_leftovers()


async def test_an_item_of_several_pieces(pair: Pair, gateway: OrderingGateway) -> None:
    source, target = pair
    pieces = {hash_of(number): bytes_of(number, 100_000) for number in range(1, 6)}
    for mm_hash, data in pieces.items():
        source.encode(mm_hash, data)
    result = completed(await gateway.transfer(source, target, *pieces))
    assert result.num_bytes == 500_000
    assert {mm_hash: target.read(mm_hash) for mm_hash in pieces} == pieces


async def test_both_ways_at_once(pair: Pair, gateway: OrderingGateway) -> None:
    one, other = pair
    one.encode(hash_of(1), bytes_of(1, MIB))
    other.encode(hash_of(2), bytes_of(2, MIB))
    there = await gateway.order(one, other, hash_of(1))
    back = await gateway.order(other, one, hash_of(2))
    completed(await asyncio.wait_for(there, 10))
    completed(await asyncio.wait_for(back, 10))
    assert (other.read(hash_of(1)), one.read(hash_of(2))) == (bytes_of(1, MIB), bytes_of(2, MIB))


async def test_already_there(pair: Pair, gateway: OrderingGateway) -> None:
    source, target = pair
    for host in pair:
        host.encode(hash_of(4), b"abcd")
    assert completed(await gateway.transfer(source, target, hash_of(4))).num_bytes == 0
    source.wait_no_leftovers()
    target.wait_no_leftovers()


async def test_orders_of_an_item_are_one_transfer(pair: Pair, gateway: OrderingGateway) -> None:
    source, target = pair
    data = bytes_of(5, MIB)
    reserved = source.reserve(hash_of(5), len(data))
    before = target.store.stats().num_seals_total
    futures = [await gateway.order(source, target, hash_of(5)) for _ in range(5)]
    assert isinstance(target.pin_or_watch(hash_of(5)), Watching)
    source.seal(reserved, data)
    results = [completed(await asyncio.wait_for(each, 10)) for each in futures]
    assert {each.num_bytes for each in results} == {len(data)}
    assert target.store.stats().num_seals_total == before + 1
    assert await asyncio.to_thread(target.wait_sealed, hash_of(5)) == data


async def test_an_order_that_joined_outlives_the_first(pair: Pair, gateway: OrderingGateway) -> None:
    source, target = pair
    reserved = source.reserve(hash_of(5), 4096)
    first = await gateway.order(source, target, hash_of(5), ttl_ms=700)
    second = await gateway.order(source, target, hash_of(5))
    assert failed(await asyncio.wait_for(first, 10)) is TransferFailureKind.EXPIRED
    source.seal(reserved, b"ab" * 2048)
    completed(await asyncio.wait_for(second, 10))
    assert target.read(hash_of(5)) == b"ab" * 2048
    source.wait_no_leftovers()
    target.wait_no_leftovers()


async def test_absent(pair: Pair, gateway: OrderingGateway) -> None:
    source, target = pair
    assert failed(await gateway.transfer(source, target, hash_of(6))) is TransferFailureKind.ABSENT
    source.wait_no_leftovers()


async def test_writer_lost(pair: Pair, gateway: OrderingGateway) -> None:
    source, target = pair
    reserved = source.reserve(hash_of(7), 4096)
    result = await gateway.order(source, target, hash_of(7))
    await until_async(lambda: asyncio.to_thread(target.is_being_written, hash_of(7)), 10.0)
    source.cancel(reserved)
    assert failed(await asyncio.wait_for(result, 10)) is TransferFailureKind.WRITER_LOST
    push = await asyncio.to_thread(target.pushes.wait_next, 5.0)
    assert push.kind == "writer_lost"
    source.wait_no_leftovers()


async def test_one_entry_lost_of_several(pair: Pair, gateway: OrderingGateway) -> None:
    source, target = pair
    source.encode(hash_of(1), b"ab")
    reserved = source.reserve(hash_of(2), 4096)
    result = await gateway.transfer(source, target, hash_of(1), hash_of(2), hash_of(3))
    assert failed(result) is TransferFailureKind.ABSENT
    source.cancel(reserved)
    source.wait_no_leftovers()
    target.wait_no_leftovers()


async def test_a_target_that_nobody_knows(pair: Pair, gateway: OrderingGateway) -> None:
    source, _ = pair
    source.encode(hash_of(8), b"ab")
    result = await gateway.transfer(source, "store-nowhere", hash_of(8))
    assert failed(result) is TransferFailureKind.UNREACHABLE
    source.wait_no_leftovers()


async def test_the_deadline_passes_before_the_seal(pair: Pair, gateway: OrderingGateway) -> None:
    source, target = pair
    reserved = source.reserve(hash_of(9), 4096)
    assert failed(await gateway.transfer(source, target, hash_of(9), ttl_ms=500)) is (
        TransferFailureKind.EXPIRED
    )
    target.wait_no_leftovers()
    source.cancel(reserved)
    source.wait_no_leftovers()


async def test_a_full_target(pair: Pair, small: FabricHost, gateway: OrderingGateway) -> None:
    source, target = pair[0], small
    taken = target.reserve(hash_of(1), 3 * MIB)
    source.encode(hash_of(2), bytes_of(2, 2 * MIB))
    late = await gateway.transfer(source, target, hash_of(2), ttl_ms=600)
    assert failed(late) in (TransferFailureKind.TARGET_FULL, TransferFailureKind.EXPIRED)
    waiting = await gateway.order(source, target, hash_of(2))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.5)
    target.cancel(taken)
    completed(await asyncio.wait_for(waiting, 10))
    assert target.read(hash_of(2)) == bytes_of(2, 2 * MIB)


async def test_an_entry_larger_than_the_target(
    pair: Pair, small: FabricHost, gateway: OrderingGateway
) -> None:
    source, target = pair[0], small
    source.encode(hash_of(1), bytes_of(1, 8 * MIB))
    assert failed(await gateway.transfer(source, target, hash_of(1))) is TransferFailureKind.REFUSED
