"""What one API key asks of encoders does not hold back another's: the order of jobs, not their times."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.support.gateway.fake_encoder import FakeEncoder
from tests.support.gateway.samples import DIGEST, MODEL, data_url, entry, image_bytes, write_keys
from tests.support.gateway.system import System, another_gateway, opened_system
from tests.support.waiting import until, until_async

NUM_SLOTS = 16  # of the fake encoder
FOR_ONE_FLOW = 12  # of them
NUM_REQUESTS, NUM_IMAGES = 8, 8
FLOOD = NUM_REQUESTS * NUM_IMAGES
KEYS = (entry("flood", "key-flood"), entry("one", "key-one"), entry("batch", "key-batch", priority=5))


@pytest.fixture
async def system(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[System]:
    """A gateway with API keys, and an encoder that starts nothing until it is told."""
    keys = write_keys(tmp_path / "keys.toml", *KEYS)
    changes = getattr(request, "param", {})
    async with opened_system(redis_url, tmp_path, api_keys_file=keys, **changes) as opened:
        await until(lambda: opened.gateway.view.encoding)
        opened.encoder.before_start.clear()
        yield opened


def image_of(number: int) -> bytes:
    """Each of its own size, so that it is another picture."""
    return image_bytes(size=(8 + number % 64, 8 + number // 64))


async def ask(system: System, key: str, colors: Sequence[int]) -> None:
    answer = await asked(system, key, colors)
    assert answer.status_code == 200, answer.text


async def asked(system: System, key: str, colors: Sequence[int]) -> httpx.Response:
    images = [{"type": "image_url", "image_url": {"url": data_url(image_of(each))}} for each in colors]
    body = {"model": MODEL, "messages": [{"role": "user", "content": images}]}
    return await system.post(body, headers={"Authorization": f"Bearer {key}"})


def flood(system: System, group: asyncio.TaskGroup, key: str = "key-flood", first: int = 0) -> None:
    for number in range(NUM_REQUESTS):
        start = first + number * NUM_IMAGES
        group.create_task(ask(system, key, range(start, start + NUM_IMAGES)))


async def num_jobs(system: System) -> int:
    return await system.bus.stream_length(system.bus.names.encode_jobs(DIGEST))


async def published(system: System, count: int) -> None:
    async def are_there() -> bool:
        return await num_jobs(system) == count

    await until_async(are_there)


async def held(system: System, count: int) -> None:
    """So many orders wait at the gateway."""
    await until(lambda: sum(system.gateway.orders.queue.num_waiting().values()) == count)


async def flood_waits(system: System) -> None:
    """All of it has come. It has all slots but the spare ones on the stream, and the rest waits here."""
    await until(lambda: len(system.gateway.orders.table) == FLOOD)
    await published(system, FOR_ONE_FLOW)
    await held(system, FLOOD - FOR_ONE_FLOW)


def place_of_the_first(encoder: FakeEncoder, flow: str) -> int:
    return next(place for place, job in enumerate(encoder.jobs) if job.flow == flow)


async def test_the_item_of_another_key_comes_within_the_slots_of_the_encoder(system: System) -> None:
    async with asyncio.TaskGroup() as group:
        flood(system, group)
        await flood_waits(system)
        one = group.create_task(ask(system, "key-one", [1000]))
        await published(system, FOR_ONE_FLOW + 1)
        await held(system, FLOOD - FOR_ONE_FLOW)
        assert "gateway_encode_flows_waiting 1.0" in (await system.http.get("/metrics")).text
        system.encoder.before_start.set()
        await one
    jobs = system.encoder.jobs
    flows = {job.flow for job in jobs}
    assert len(flows) == 2
    alone = next(flow for flow in flows if sum(job.flow == flow for job in jobs) == 1)
    assert place_of_the_first(system.encoder, alone) <= NUM_SLOTS


async def test_an_item_of_a_flood_that_another_key_asks_for_has_the_turn_of_that_key(system: System) -> None:
    checked = system.gateway.services.access.api_keys.check_key
    one_flow, flood_flow = (checked(f"Bearer key-{each}", None).flow for each in ("one", "flood"))
    async with asyncio.TaskGroup() as group:
        flood(system, group)
        await flood_waits(system)
        one = group.create_task(ask(system, "key-one", [FLOOD - 1]))  # the flood's last item
        await published(system, FOR_ONE_FLOW + 1)
        assert len(system.gateway.orders.table) == FLOOD
        system.encoder.before_start.set()
        await one
    flows = [job.flow for job in system.encoder.jobs]
    assert flows.count(one_flow) == 1
    assert flows.index(one_flow) <= NUM_SLOTS
    assert flows.count(flood_flow) == FLOOD - 1


async def test_it_does_so_over_two_gateways(system: System) -> None:
    async with another_gateway(system, "gateway-1") as other:
        await until(lambda: len([r for r in system.gateway.view.records if r.role == "gateway"]) == 2)
        await until(lambda: other.gateway.view.encoding)
        async with asyncio.TaskGroup() as group:
            flood(system, group)
            await until(lambda: len(system.gateway.orders.table) == FLOOD)
            await held(system, FLOOD - FOR_ONE_FLOW)
            one = group.create_task(ask(other, "key-one", [1000]))
            await until(lambda: len(other.gateway.orders.table) == 1)
            await held(other, 0)
            assert await num_jobs(system) <= NUM_SLOTS
            system.encoder.before_start.set()
            await one
        alone = system.gateway.services.access.api_keys.check_key("Bearer key-one", None).flow
        assert place_of_the_first(system.encoder, alone) <= NUM_SLOTS


@pytest.mark.parametrize("system", [{"max_queued_jobs": 20}], indirect=True)
async def test_a_flood_is_refused_and_another_key_is_served(system: System) -> None:
    async with asyncio.TaskGroup() as group:
        starts = range(0, 100 * NUM_REQUESTS, 100)
        tasks = [
            group.create_task(asked(system, "key-flood", range(each, each + NUM_IMAGES))) for each in starts
        ]
        await until(lambda: any(task.done() for task in tasks))
        one = group.create_task(ask(system, "key-one", [5000]))
        system.encoder.before_start.set()
        await one
    answers = [task.result() for task in tasks]
    refused = [each for each in answers if each.status_code == 429]
    assert refused
    assert len(refused) < len(answers)
    assert {each.json()["error"]["code"] for each in refused} == {"encode_queue_full"}
