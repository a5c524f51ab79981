"""What operators' tools see of the streams, on a real Redis."""

from collections.abc import AsyncIterator

import pytest

from triptych_common.bus import AsyncBus
from triptych_common.bus.inspection import (
    delete_deployment,
    find_streams,
    list_lags,
    peek,
    read_clock_s,
    read_lags,
)
from triptych_common.protocol.messages import EncodeNeeded

DIGEST = "d" * 64
MESSAGE = EncodeNeeded(
    request_id="r", item_index=0, mm_hash="0" * 64, prefill_decode="prefill_decode-0", reason="absent"
)


@pytest.fixture
async def bus(redis_url: str) -> AsyncIterator[AsyncBus]:
    async with await AsyncBus.connect(redis_url, "inspected", client_name="test") as connected:
        yield connected


async def test_every_stream_is_listed_with_its_groups(bus: AsyncBus) -> None:
    await bus.publish(bus.names.encode_results("gateway-0"), MESSAGE)
    async with bus.consumer(
        bus.names.encode_jobs(DIGEST), group="encoders", consumer="encoder-0"
    ) as consumer:
        await bus.publish(bus.names.encode_jobs(DIGEST), MESSAGE)
        async for _ in consumer:
            break
        lags = {lag.stream: lag for lag in await list_lags(bus)}
    assert (
        lags[f"encode-jobs:{{{DIGEST}}}:store-0"].group,
        lags[f"encode-jobs:{{{DIGEST}}}:store-0"].num_pending,
    ) == ("encoders", 1)
    assert lags[f"encode-jobs:{{{DIGEST}}}:store-0"].oldest_s is not None
    assert (lags["encode-results:gateway-0"].group, lags["encode-results:gateway-0"].num_entries) == (None, 1)


async def test_named_streams_are_read_without_a_search(bus: AsyncBus) -> None:
    jobs = f"encode-jobs:{{{DIGEST}}}:store-0"
    async with bus.consumer(
        bus.names.encode_jobs(DIGEST), group="encoders", consumer="encoder-0"
    ) as consumer:
        for _ in range(3):
            await bus.publish(bus.names.encode_jobs(DIGEST), MESSAGE)
        await anext(aiter(consumer))
        (lag,) = await read_lags(bus, [jobs, "encode-jobs:" + "0" * 64])  # the other one is not there
    assert (lag.stream, lag.num_entries, lag.num_pending, lag.num_waiting) == (jobs, 3, 1, 2)
    assert lag.oldest_s is not None
    assert 0 <= await read_clock_s(bus) - lag.oldest_s < 60


async def test_peek_shows_the_newest_first_and_takes_nothing(bus: AsyncBus) -> None:
    stream = bus.names.encode_results("gateway-0")
    ids = [await bus.publish(stream, MESSAGE) for _ in range(3)]
    entries = await peek(bus, "encode-results:gateway-0", 2)
    assert [entry.entry_id for entry in entries] == ids[:0:-1]
    assert entries[0].fields["type"] == b"EncodeNeeded"
    assert entries[0].published_s > 1e9
    assert len(await peek(bus, "encode-results:gateway-0", 10)) == 3


async def test_a_stream_is_found_by_the_beginning_of_its_name(bus: AsyncBus) -> None:
    jobs = [bus.names.encode_jobs(digest) for digest in ("0" * 64, "1" * 64)]
    inboxes = [bus.names.metadata("pd-1"), bus.names.metadata("pd-10")]
    for stream in (*jobs, *inboxes):
        await bus.publish(stream, MESSAGE)
    assert await find_streams(bus, "encode-jobs") == [
        f"encode-jobs:{{{'0' * 64}}}:store-0",
        f"encode-jobs:{{{'1' * 64}}}:store-0",
    ]
    assert await find_streams(bus, "encode-jobs:1") == [f"encode-jobs:{{{'1' * 64}}}:store-0"]
    assert await find_streams(bus, "metadata:pd-1") == ["metadata:pd-1"]
    assert await find_streams(bus, "nothing") == []


async def test_a_deployment_is_deleted_alone(bus: AsyncBus, redis_url: str) -> None:
    await bus.publish(bus.names.encode_jobs(DIGEST), MESSAGE)
    async with await AsyncBus.connect(redis_url, "other", client_name="test") as other:
        await other.publish(other.names.encode_jobs(DIGEST), MESSAGE)
        assert await delete_deployment(bus) == 1
        assert await list_lags(bus) == []
        assert len(await list_lags(other)) == 1
