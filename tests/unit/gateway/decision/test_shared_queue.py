"""Other gateways' jobs, as read from Redis."""

import asyncio
from typing import Any

import pytest

from triptych_common.domain.errors import BusUnavailableError
from triptych_gateway.decision import redis_reads
from triptych_gateway.decision.redis_reads import SharedQueue


class Flights:
    """`SingleFlight`: so many jobs are on the stream."""

    def __init__(self, num_jobs: int) -> None:
        self.num_jobs = num_jobs
        self.num_reads = 0
        self.error: Exception | None = None
        self.hangs = False

    async def read_backlog(self, namespace_digest: str) -> tuple[int, float]:
        self.num_reads += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return self.num_jobs, 0.0


def made(num_jobs: int) -> tuple[SharedQueue, Flights]:
    flights: Any = Flights(num_jobs)
    return SharedQueue(flights.read_backlog), flights


async def test_what_is_left_beyond_its_own() -> None:
    queue, flights = made(7)
    assert await queue.num_others("a", 3) == 4
    assert await queue.num_others("a", 3) == 4  # not read again so soon
    assert flights.num_reads == 1
    assert await queue.num_others("b", 9) == 0


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_redis_that_does_not_answer_holds_up_no_decision(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_reads, "QUEUE_LIMIT_S", 0.01)
    queue, flights = made(7)
    flights.error, flights.hangs = BusUnavailableError("away"), hangs
    assert await queue.num_others("a", 3) == 0
