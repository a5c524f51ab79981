"""Many streams at once through one gateway process: none broken, all of their tokens in order.

How many more, and what they cost: `benchmarks/gateway_streams.py`, whose parts these are.
"""

import os
from collections.abc import Iterator

import pytest
from gateway_bench.arms import GATEWAY, running_arms
from gateway_bench.streams import StreamsWorkload, run_streams

NUM_STREAMS, NUM_TOKENS, OPENING_MS, GAP_MS = 200, 20, 400.0, 30.0


@pytest.fixture
def own_cores() -> Iterator[None]:
    """The arms take one core, and leave another one to this process."""
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.usefixtures("own_cores")
async def test_two_hundred_streams() -> None:
    """All are open at once: the last one begins before the first one ends."""
    assert OPENING_MS < NUM_TOKENS * GAP_MS
    workload = StreamsWorkload("streams", True, NUM_STREAMS, NUM_TOKENS, OPENING_MS, GAP_MS)
    async with running_arms({}, {"TRIPTYCH_MAX_REQUESTS_IN_FLIGHT": str(NUM_STREAMS)}) as arms:
        (arm,) = [each for each in arms if each.name == GATEWAY]
        result = await run_streams(arm, workload)
    assert (result.num_broken, result.errors) == (0, [])
    assert len(result.latency_ms) == NUM_STREAMS * NUM_TOKENS
    assert 0 < result.kib_per_stream < 1024
