"""A reader stops (SIGSTOP) while others go on publishing: memory in Redis is bounded, nothing is trimmed."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.conftest import EmbeddedRedis
from tests.integration.common.samples import LIMIT_S, STREAM, consuming_bus, ids, message, take
from tests.support.waiting import wait_until
from triptych_common.bus import AsyncBus, ThreadedBus, dead_letters, publisher
from triptych_common.domain.errors import StreamFullError

BOUND = 200
FLOOD = 1000


@pytest.fixture(autouse=True)
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "MAX_STREAM_ENTRIES", BOUND)
    monkeypatch.setattr(publisher, "LOOK_EVERY", 0)  # the length is read with each entry


@pytest.fixture
def taker(own_redis: EmbeddedRedis) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.integration.common.bus.taker", own_redis.url],
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def lines(process: "subprocess.Popen[str]", count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(count)]


async def test_a_flood_ends_at_the_bound_and_nothing_is_lost(
    own_redis: EmbeddedRedis, taker: "subprocess.Popen[str]"
) -> None:
    async with (
        await AsyncBus.connect(own_redis.url, "test", client_name="tests") as bus,
        asyncio.timeout(2 * LIMIT_S),
    ):
        await bus.publish(STREAM, message(0))
        assert await asyncio.to_thread(lines, taker, 1) == ids(0)
        taker.send_signal(signal.SIGSTOP)
        accepted: list[int] = []
        for number in range(1, FLOOD):
            with contextlib.suppress(StreamFullError):
                await bus.publish(STREAM, message(number))
                accepted.append(number)
        assert len(accepted) == BOUND
        assert await bus.stream_length(STREAM) == BOUND
        with pytest.raises(StreamFullError, match="its reader has stopped"):
            await bus.publish(STREAM, message(FLOOD))
        await bus.publish("triptych:test:acks:other", message(1))  # others are not held up
        taker.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(lines, taker, BOUND) == ids(*accepted)
        await bus.publish(STREAM, message(FLOOD + 1))
        assert await asyncio.to_thread(lines, taker, 1) == ids(FLOOD + 1)


async def test_a_publisher_passes_the_bound_by_what_it_appends_between_two_looks(
    own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "LOOK_EVERY", 30)
    async with await AsyncBus.connect(own_redis.url, "test", client_name="tests") as bus:
        for number in range(FLOOD):
            with contextlib.suppress(StreamFullError):
                await bus.publish(STREAM, message(number))
        assert BOUND <= await bus.stream_length(STREAM) <= BOUND + 30


async def test_many_publishers_pass_the_bound_by_what_is_under_way(own_redis: EmbeddedRedis) -> None:
    async with await AsyncBus.connect(own_redis.url, "test", client_name="tests") as bus:
        width = 20

        async def flood(start: int) -> None:
            for number in range(start, FLOOD, width):
                with contextlib.suppress(StreamFullError):
                    await bus.publish(STREAM, message(number))

        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*map(flood, range(width)))
        assert BOUND <= await bus.stream_length(STREAM) <= BOUND + width


async def test_jobs_have_a_bound_of_their_own(own_redis: EmbeddedRedis) -> None:
    async with await AsyncBus.connect(own_redis.url, "test", client_name="tests") as bus:
        for number in range(BOUND + 5):
            await bus.publish(bus.names.encode_jobs("d" * 64), message(number))
        assert await bus.stream_length(bus.names.encode_jobs("d" * 64)) == BOUND + 5


def test_threaded_bus_drops_for_the_full_stream_only(
    own_redis: EmbeddedRedis, taker: "subprocess.Popen[str]"
) -> None:
    with closing(ThreadedBus(own_redis.url, "test", client_name="tests")) as bus:
        bus.publish(STREAM, message(0))
        assert lines(taker, 1) == ids(0)
        taker.send_signal(signal.SIGSTOP)
        for number in range(1, FLOOD):
            assert bus.publish(STREAM, message(number))
        bus.publish("triptych:test:acks:other", message(1))
        wait_until(lambda: not bus.num_queued, LIMIT_S, "all is sent or dropped")
    num_sent = FLOOD - 1 - bus.num_dropped
    assert BOUND <= num_sent <= BOUND + 128  # one batch may be under way
    taker.send_signal(signal.SIGCONT)
    assert lines(taker, num_sent) == ids(*range(1, num_sent + 1))


async def test_dead_letters_drop_the_oldest(
    own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "DEAD_LETTERS_MAX_ENTRIES", 100)
    async with consuming_bus(own_redis.url, prefetch=64) as (bus, consumer):
        client: Any = bus.client
        async with client.pipeline(transaction=False) as pipe:
            for number in range(500):
                pipe.xadd(STREAM, {"nonsense": str(number)})
            await pipe.execute()
        await bus.publish(STREAM, message(1))
        assert await take(consumer, 1) == ids(1)
        assert await bus.stream_length(bus.names.dead_letters) <= 200  # trimmed by whole nodes of 100
