"""What an idle consumer may take from a stream that is not its own."""

from typing import Any

import pytest

from tests.integration.common.samples import message
from triptych_common.bus import AsyncBus, Delivery
from triptych_common.bus.consumer_group import SPARE_MAX_WAIT_MS, ConsumerGroup
from triptych_common.protocol import codec
from triptych_common.protocol.names import ENCODERS_GROUP

DIGEST = "d" * 64


class Streams:
    """One stream, its own consumer and one from elsewhere."""

    def __init__(self, bus: AsyncBus) -> None:
        self.bus = bus
        self.stream = bus.names.encode_jobs(DIGEST)
        self.near = bus.consumer(self.stream, group=ENCODERS_GROUP, consumer="near", prefetch=9)
        self.far = bus.consumer(self.stream, group=ENCODERS_GROUP, consumer="far")

    async def publish(self, number: int, spare_after_ms: int | None = 0, age_ms: int = 0) -> None:
        """An entry that has waited for so long."""
        seconds, micros = await self.bus.client.time()
        fields: Any = codec.encode(message(number), spare_after_ms=spare_after_ms)
        await self.bus.client.xadd(
            self.stream, fields, id=f"{seconds * 1000 + micros // 1000 - age_ms}-{number}"
        )

    async def take(self, **slots: int) -> int | None:
        """The number of what the other consumer gets; it is acked."""
        delivery = await self.far.take_spare(slots)
        if delivery is None:
            return None
        await delivery.ack()
        return number_of(delivery)


def number_of(delivery: Delivery) -> int:
    found: Any = delivery.envelope.message
    return int(found.job_id.removeprefix("job-"))


@pytest.fixture
async def streams(bus: AsyncBus) -> Any:
    streams = Streams(bus)
    async with streams.near, streams.far:
        await streams.near.take_within(1)  # it makes the group
        yield streams


async def test_only_what_its_own_consumers_have_no_room_for(streams: Streams) -> None:
    await streams.publish(1)
    assert await streams.take(near=1) is None
    await streams.publish(2)
    assert await streams.take(near=1) == 1, "the oldest"
    assert await streams.take(near=1) is None, "one is left for one slot"
    assert await streams.take(near=0) == 2


async def test_slots_that_are_taken_are_not_free(streams: Streams) -> None:
    await streams.publish(1)
    held = await streams.near.take_within(1000)
    assert held is not None
    await streams.publish(2)
    assert await streams.take(near=2) is None
    assert await streams.take(near=1) == 2


async def test_not_before_it_has_waited_as_long_as_its_publisher_wants(streams: Streams) -> None:
    await streams.publish(1, spare_after_ms=60_000, age_ms=30_000)
    assert await streams.take(near=0) is None
    await streams.bus.client.delete(streams.stream)
    await streams.bus.client.xgroup_create(streams.stream, ENCODERS_GROUP, id="0", mkstream=True)
    await streams.publish(2, spare_after_ms=60_000, age_ms=60_000)
    assert await streams.take(near=0) == 2


async def test_what_free_consumers_do_not_take_for_long(streams: Streams) -> None:
    """They hang, or cannot reach Redis."""
    await streams.publish(1, age_ms=SPARE_MAX_WAIT_MS)
    assert await streams.take(near=8) == 1


async def test_what_is_for_its_own_consumers_alone_is_taken_by_no_other(streams: Streams) -> None:
    await streams.publish(1, spare_after_ms=None, age_ms=3_600_000)
    assert await streams.take(near=0) is None


async def test_a_stream_that_is_not_there_is_not_made(bus: AsyncBus) -> None:
    stream = bus.names.encode_jobs(DIGEST, "nowhere")
    async with bus.consumer(stream, group=ENCODERS_GROUP, consumer="far") as far:
        assert await far.take_spare({"near": 0}) is None
    assert not await bus.client.exists(stream)


async def test_it_says_how_long_it_waited(streams: Streams) -> None:
    """Redis' clock is not this machine's."""
    await streams.publish(1, age_ms=20_000)
    delivery = await streams.far.take_spare({"near": 0})
    assert delivery is not None
    assert 19 < delivery.envelope.queued_s < 80
    assert (delivery.stream, delivery.num_deliveries) == (streams.stream, 1)
    assert streams.far.num_outstanding == 1
    await delivery.ack()
    assert await streams.bus.stream_length(streams.stream) == 0


async def test_an_ack_that_failed_goes_out_with_the_next_look(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    await streams.publish(1)
    delivery = await streams.far.take_spare({"near": 0})
    assert delivery is not None
    with monkeypatch.context() as patched:
        patched.setattr(ConsumerGroup, "ack", _refused)
        await delivery.ack()
        await streams.publish(2)
        assert await streams.far.take_spare({"near": 0}) is None, "Redis is still away"
    assert await streams.take(near=0) == 2
    assert await streams.bus.stream_length(streams.stream) == 0


async def _refused(*_: object) -> None:
    raise ConnectionResetError
