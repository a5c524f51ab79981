"""The order in which encoders make items ready: real Redis, store and service; an engine of the test."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.support.encoder.service_bench import DIGEST, LIMIT_S, Bench, job, working
from tests.support.stores import StoreProcess
from tests.support.waiting import until, until_async
from triptych_common.bus import AsyncBus, stream_consumer
from triptych_common.coordination import SingleFlight
from triptych_common.protocol import codec
from triptych_common.protocol.messages import EncodeCompleted, EncoderCacheMetadata
from triptych_common.protocol.names import ENCODERS_GROUP
from triptych_encoder.jobs import job_intake, job_leases

HASHES = [f"{n:064x}" for n in range(16)]
OTHERS = HASHES[8:10]
SLOTS = 8
NUM_READS = 3  # of an encoder that waits: jobs, preallocation notifications, acknowledgements


def prepares_all(bench: Bench) -> None:
    for each in HASHES:
        bench.engine.may_preprocess[each].set()


async def occupied(bench: Bench) -> None:
    """vLLM has an item of another request, and one that waits behind it."""
    bench.engine.may_seal = asyncio.Queue()
    bench.engine.may_encode.set()
    for index, each in enumerate(OTHERS):  # one after the other: an idle engine takes what is ready first
        await bench.publish(each, "req-0", index)
        async with asyncio.timeout(LIMIT_S):
            assert await bench.engine.encodes.get() == each


def lets_go_on(bench: Bench, count: int) -> None:
    assert bench.engine.may_seal is not None
    for _ in range(count):
        bench.engine.may_seal.put_nowait(None)


async def test_all_sizes_are_known_before_anything_is_encoded(redis_url: str, store: StoreProcess) -> None:
    async with working(redis_url, store, num_slots=SLOTS) as bench:
        prepares_all(bench)
        for index in range(6):
            await bench.publish(HASHES[index], item_index=index)
        sizes = await bench.results(6)
        assert all(isinstance(each, EncoderCacheMetadata) for each in sizes)
        assert sorted(each.mm_hash for each in sizes) == HASHES[:6]  # type: ignore[attr-defined]
        bench.engine.may_encode.set()
        done = await bench.results(6)
        assert all(isinstance(each, EncodeCompleted) for each in done)


async def test_seals_come_in_the_order_of_the_prompt(redis_url: str, store: StoreProcess) -> None:
    """However the jobs and their preprocessing were scrambled."""
    async with working(redis_url, store, num_slots=SLOTS) as bench:
        prepares_all(bench)
        await occupied(bench)
        for index in (2, 0, 3, 1):
            await bench.publish(HASHES[index], "req-1", index)
        await bench.results(len(OTHERS) + 4)  # their sizes
        lets_go_on(bench, len(OTHERS) + 4)
        await bench.results(len(OTHERS) + 4)
        assert bench.engine.sealed == [*OTHERS, *HASHES[:4]]


async def test_an_item_that_nobody_waits_for_any_more_is_not_encoded(
    redis_url: str, store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_leases, "REFRESH_AFTER_S", 0.0)
    async with working(redis_url, store, num_slots=SLOTS) as bench:
        prepares_all(bench)
        await occupied(bench)
        for index in range(2):
            await bench.publish(HASHES[index], f"req-{index + 1}")
        await bench.results(len(OTHERS) + 2)
        assert store.stats().num_reservations == len(OTHERS) + 2
        left = await SingleFlight(bench.bus).leave_flight(HASHES[0], [("req-1", 0)], namespace_digest=DIGEST)
        assert not left  # the encoder has it: no gateway takes it off the stream
        lets_go_on(bench, len(OTHERS) + 1)
        await bench.results(len(OTHERS) + 1)
        assert bench.engine.sealed == [*OTHERS, HASHES[1]]
        assert [bench.engine.encodes.get_nowait()] == [HASHES[1]]
        assert bench.engine.encodes.empty()
        await until_async(lambda: no_job_is_queued(bench))
        await until(lambda: not store.stats().num_reservations)


# ---- several encoders ------------------------------------------------------------------------------
async def all_at_once(bus: AsyncBus, mm_hashes: Sequence[str]) -> None:
    """No encoder sees one of these jobs before all of them stand on the stream."""
    async with bus.client.pipeline(transaction=True) as pipe:
        for index, each in enumerate(mm_hashes):
            fields: Any = codec.encode(job(each, item_index=index), remaining_ms=60_000, blob=b"media")
            pipe.xadd(bus.names.encode_jobs(DIGEST), fields)
        await pipe.execute()


async def ready(*encoders: Bench) -> None:
    """Each is registered, and waits for jobs."""
    await until_async(lambda: are_ready(encoders))


async def no_job_is_queued(bench: Bench) -> bool:
    return not await bench.bus.stream_length(bench.bus.names.encode_jobs(DIGEST))


async def are_ready(encoders: Sequence[Bench]) -> bool:
    clients: Any = await encoders[0].bus.client.client_list()
    reads = Counter(each["name"] for each in clients if each["cmd"] == "xreadgroup" and "b" in each["flags"])
    waiting = [num for name, num in reads.items() if name.count("encoder-") == 2]
    is_registered = len(await encoders[0].records()) == len(encoders)
    return is_registered and waiting == [NUM_READS] * len(encoders)


async def test_two_encoders_share_the_items_of_one_request(
    redis_url: str, store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_consumer, "AHEAD_WAIT_S", LIMIT_S)  # neither is too slow to take its share
    monkeypatch.setattr(job_intake, "REFRESH_INTERVAL_S", 0.0)  # the first has seen itself alone
    async with AsyncExitStack() as stack:
        encoders = [
            await stack.enter_async_context(
                working(redis_url, store, instance=f"encoder-{n}", num_slots=SLOTS)
            )
            for n in range(2)
        ]
        for each in encoders:
            prepares_all(each)
        bus = encoders[0].bus
        await ready(*encoders)
        await all_at_once(bus, HASHES[:4])
        await encoders[0].results(4)
        assert [each.engine.num_preprocessing for each in encoders] == [2, 2]


async def test_one_that_does_not_take_its_share_keeps_nothing_from_the_others(
    redis_url: str, store: StoreProcess
) -> None:
    """It is registered, and reads nothing."""
    async with working(redis_url, store, num_slots=SLOTS) as bench:
        prepares_all(bench)
        await ready(bench)
        record = (await bench.records())[0].model_copy(update={"instance": "encoder-1", "boot_id": "b"})
        async with bench.registry.keep_registered(record):
            await all_at_once(bench.bus, HASHES[:6])
            sizes = await bench.results(6)
            assert sorted(each.mm_hash for each in sizes) == HASHES[:6]  # type: ignore[attr-defined]
            consumers: Any = await bench.bus.client.xinfo_consumers(
                bench.bus.names.encode_jobs(DIGEST), ENCODERS_GROUP
            )
            assert [(each["name"], each["pending"]) for each in consumers] == [(b"encoder-0", 6)]
