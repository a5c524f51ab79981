"""Jobs of one request stand on the stream in the order of its prompt; requests take turns."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway.samples import DIGEST, image_part
from tests.support.gateway.system import System, opened_system
from tests.support.waiting import until_async
from triptych_common.coordination import SingleFlight
from triptych_common.protocol import codec
from triptych_common.protocol.messages import EncodeJob

NUM_IMAGES = 8


def images(first: int, count: int) -> list[dict[str, Any]]:
    return [image_part(first + n) for n in range(count)]


@pytest.fixture
async def system(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[System]:
    """Redis takes longer to answer about an item, the earlier it stands in its prompt."""
    claim = SingleFlight.claim_flight

    async def slow_claim(self: SingleFlight, mm_hash: str, requesters: Any, **options: Any) -> Any:
        answer = await claim(self, mm_hash, requesters, **options)
        await asyncio.sleep(0.01 * (NUM_IMAGES - min(each.item_index for each in requesters)))
        return answer

    monkeypatch.setattr(SingleFlight, "claim_flight", slow_claim)
    async with opened_system(redis_url, tmp_path) as opened:
        assert opened.gateway.settings.num_publishers > 1
        yield opened


async def published(system: System, count: int) -> list[tuple[str, int]]:
    """(request, item index) of all jobs in the order of the stream, when there are `count`."""
    stream = system.bus.names.encode_jobs(DIGEST)

    async def are_there() -> bool:
        return await system.bus.stream_length(stream) >= count

    await until_async(are_there)
    entries: Any = await system.bus.client.xrange(stream)
    found: list[tuple[str, int]] = []
    for _, fields in entries:
        job = codec.decode(fields).message
        assert isinstance(job, EncodeJob)
        (requester,) = job.requesters
        found.append((requester.request_id, requester.item_index))
    return found


async def test_the_order_of_the_prompt_whatever_redis_takes(system: System) -> None:
    system.encoder.before_start.clear()
    asking = asyncio.ensure_future(system.ask(images(0, NUM_IMAGES)))
    jobs = await published(system, NUM_IMAGES)
    assert [index for _, index in jobs] == list(range(NUM_IMAGES))
    system.encoder.before_start.set()
    assert (await asking).choices


async def test_a_request_with_one_image_does_not_wait_for_one_with_many(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, claim = asyncio.Event(), SingleFlight.claim_flight

    async def held_claim(self: SingleFlight, mm_hash: str, requesters: Any, **options: Any) -> Any:
        if min(each.item_index for each in requesters) > 0:
            await may_go_on.wait()
        return await claim(self, mm_hash, requesters, **options)

    monkeypatch.setattr(SingleFlight, "claim_flight", held_claim)
    system.encoder.before_start.clear()
    many = asyncio.ensure_future(system.ask(images(0, NUM_IMAGES)))
    ((of_many, _),) = await published(system, 1)
    one = asyncio.ensure_future(system.ask(images(100, 1)))
    jobs = await published(system, 2)
    assert [index for _, index in jobs] == [0, 0]
    may_go_on.set()
    jobs = await published(system, NUM_IMAGES + 1)
    assert [index for request_id, index in jobs if request_id == of_many] == list(range(NUM_IMAGES))
    system.encoder.before_start.set()
    assert all(answer.choices for answer in await asyncio.gather(many, one))
