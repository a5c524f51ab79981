"""Jobs of one request stand on the stream in the order of its prompt."""

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
