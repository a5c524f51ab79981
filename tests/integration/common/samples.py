"""What the tests of the bus send, and how they take it."""

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Any

import redis

from tests.support.waiting import until
from triptych_common.bus import AsyncBus, ThreadedBus
from triptych_common.bus.stream_consumer import StreamConsumer
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeCompleted

STREAM = "triptych:test:acks:e"
LIMIT_S = 60.0


def message(number: int) -> EncodeCompleted:
    return EncodeCompleted(job_id=f"job-{number}", mm_hash="ab" * 32, encoder="e", encode_s=0)


@asynccontextmanager
async def consuming_bus(url: str, **options: Any) -> AsyncIterator[tuple[AsyncBus, StreamConsumer]]:
    """A bus and a consumer of `STREAM`, for a limited time."""
    async with (
        await AsyncBus.connect(url, "test", client_name="tests") as bus,
        bus.consumer(STREAM, group="g", consumer="c", **options) as consumer,
        asyncio.timeout(LIMIT_S),
    ):
        yield bus, consumer


@contextmanager
def reading_bus(url: str) -> "Iterator[tuple[ThreadedBus, queue.Queue[Envelope]]]":
    """A threaded bus that reads `STREAM`, and what it has received."""
    received: queue.Queue[Envelope] = queue.Queue()
    with closing(ThreadedBus(url, "test", client_name="tests")) as bus:
        bus.subscribe(STREAM, group="g", consumer="c", callback=received.put)
        yield bus, received


async def take(consumer: StreamConsumer, count: int) -> list[str]:
    """The job ids of the next `count` entries, each acked."""
    taken: list[str] = []
    async with asyncio.timeout(LIMIT_S):
        while len(taken) < count:
            delivery = await anext(consumer)
            await delivery.ack()
            assert isinstance(delivery.envelope.message, EncodeCompleted)
            taken.append(delivery.envelope.message.job_id)
    return taken


def take_queued(received: "queue.Queue[Envelope]", count: int) -> list[str]:
    """The same from a threaded bus' callback."""
    envelopes = [received.get(timeout=LIMIT_S) for _ in range(count)]
    return [
        envelope.message.job_id for envelope in envelopes if isinstance(envelope.message, EncodeCompleted)
    ]


async def until_lost(consumer: StreamConsumer) -> None:
    """Return once `consumer` has noticed that Redis is away."""
    await until(lambda: not consumer.is_connected)


async def until_blocked(redis_url: str) -> None:
    """Return once a client of Redis waits in a blocking command."""
    with redis.Redis.from_url(redis_url) as client:
        await until(lambda: client.info("clients")["blocked_clients"])


def ids(*numbers: int) -> list[str]:
    return [f"job-{number}" for number in numbers]
