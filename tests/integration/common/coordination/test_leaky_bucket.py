"""The script counts as the algorithm says: the virtual scheduling form of the GCRA, which is equivalent.

ITU-T I.371, annex A, has both forms. The script is the one with a level; here is the one with a theoretical
arrival time, in exact fractions.
"""

import asyncio
from fractions import Fraction

import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from triptych_common.bus import AsyncBus
from triptych_common.coordination import RateCharge, RequestCounts

PERIOD_US = 60_000_000
NOW = 1_800_000_000_000_000
MARGIN = Fraction(1, 1000)  # of a request: nearer to the limit than this, rounding decides


class VirtualScheduling:
    """One rate: a request of cost n may come when its theoretical arrival time is not too far ahead."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.interval_us = Fraction(PERIOD_US, limit)
        self.arrival_us = Fraction(0)

    def excess(self, cost: int, now_us: int) -> Fraction:
        """How much of it there is no room for now."""
        ahead_us = max(Fraction(0), self.arrival_us - now_us)
        return (ahead_us + cost * self.interval_us - PERIOD_US) / self.interval_us

    def charge(self, cost: int, now_us: int) -> None:
        """Also a negative one: never below nothing."""
        self.arrival_us = max(self.arrival_us, Fraction(now_us)) + cost * self.interval_us
        self.arrival_us = max(self.arrival_us, Fraction(now_us))  # of what is given back


Steps = list[tuple[int, int, int]]  # microseconds since the step before; cost; correction afterwards


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    limit=st.integers(1, 10_000),
    steps=st.lists(
        st.tuples(st.integers(0, 2 * PERIOD_US), st.integers(1, 10_000), st.integers(-10_000, 20_000)),
        min_size=1,
        max_size=30,
    ),
)
def test_the_script_and_the_algorithm_agree(redis_url: str, limit: int, steps: Steps) -> None:
    asyncio.run(_agree(redis_url, limit, steps))


async def _agree(redis_url: str, limit: int, steps: Steps) -> None:
    with redis.Redis.from_url(redis_url) as raw:
        raw.flushdb()
    model, now_us = VirtualScheduling(limit), NOW
    async with await AsyncBus.connect(redis_url, "test", client_name="tests") as bus:
        counts = RequestCounts(bus)
        for number, (pause_us, cost, correction) in enumerate(steps):
            now_us += pause_us
            charge = RateCharge("tokens", limit, min(cost, limit))
            excess = model.excess(charge.cost, now_us)
            counted = await counts.count_request("k", [charge], place=str(number), lease_s=9, now_us=now_us)
            if abs(excess) > MARGIN:
                assert (counted.reached is None) == (excess < 0), (number, float(excess), counted)
            if counted.reached is None:
                model.charge(charge.cost, now_us)
                await counts.settle_requests("k", [charge._replace(cost=correction)], [], now_us=now_us)
                model.charge(correction, now_us)
            elif abs(excess) > MARGIN:
                wait_s = float(excess * model.interval_us) / 1e6
                assert abs(counted.wait_s - wait_s) <= 1e-3 * max(1.0, wait_s), (number, counted, wait_s)
