"""Limits of API keys, counted by the scripts on a real Redis; time is what the test says it is."""

import asyncio
from typing import Any

import pytest
import redis

from triptych_common.bus import AsyncBus
from triptych_common.coordination import CountResult, RateCharge, RequestCounts

SECOND = 1_000_000
NOW = 1_800_000_000 * SECOND
KEY = "alice"
LEASE_S = 30.0


@pytest.fixture
def raw(redis_url: str) -> Any:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
async def counts(bus: AsyncBus) -> RequestCounts:
    return RequestCounts(bus)


async def count(
    counts: RequestCounts, *charges: RateCharge, at_s: float = 0, place: str = "p", max_places: int = 0
) -> CountResult:
    now_us = NOW + round(at_s * SECOND)
    return await counts.count_request(
        KEY, charges, place=place, max_places=max_places, lease_s=LEASE_S, now_us=now_us
    )


def requests(limit: int) -> RateCharge:
    return RateCharge("requests", limit, 1)


async def test_exactly_as_many_pass_as_the_limit_has(bus: AsyncBus, redis_url: str) -> None:
    """Of many at once, from two gateways."""
    async with await AsyncBus.connect(redis_url, "test", client_name="other") as other:
        gateways = [RequestCounts(bus), RequestCounts(other)]
        results = await asyncio.gather(
            *(count(gateways[n % 2], requests(10), place=str(n)) for n in range(40))
        )
    refused = [result for result in results if result.reached]
    assert len(refused) == 30
    assert {(result.reached, result.wait_s) for result in refused} == {("requests", 6.0)}
    levels = sorted(result.levels["requests"] for result in results if not result.reached)
    assert levels == [float(number) for number in range(1, 11)]


async def test_a_request_is_counted_on_all_rates_or_on_none(counts: RequestCounts) -> None:
    both = (requests(10), RateCharge("tokens", 100, 60))
    assert (await count(counts, *both)).levels == {"requests": 1.0, "tokens": 60.0}
    refused = await count(counts, *both, max_places=1)
    assert (refused.reached, refused.wait_s) == ("tokens", 12.0)
    assert refused.levels == {"requests": 1.0, "tokens": 60.0}
    assert (await count(counts, requests(10), max_places=1)).reached is None  # the refused one took no place


async def test_the_longest_wait_is_told(counts: RequestCounts) -> None:
    both = (requests(1), RateCharge("tokens", 100, 100))
    await count(counts, *both)
    await counts.settle_requests(KEY, [RateCharge("tokens", 100, 50)], [], now_us=NOW)
    refused = await count(counts, *both)
    assert (refused.reached, refused.wait_s) == ("tokens", 90.0)


async def test_places_are_bounded_and_given_back(counts: RequestCounts) -> None:
    for place in ("a", "b", "b"):  # a command that is sent again finds its own
        assert (await count(counts, place=place, max_places=2)).reached is None
    assert (await count(counts, place="c", max_places=2)).reached == "concurrent_requests"
    await counts.settle_requests(KEY, [], ["a"], now_us=NOW)
    assert (await count(counts, place="c", max_places=2)).reached is None
    assert (await count(counts, place="d", max_places=2)).reached == "concurrent_requests"


async def test_places_of_a_gateway_that_died_are_free_when_their_leases_end(counts: RequestCounts) -> None:
    for place in ("dead", "renewed"):
        await count(counts, place=place, max_places=2)
    await counts.renew_places(KEY, ["renewed"], lease_s=LEASE_S, now_us=NOW + 20 * SECOND)
    assert (await count(counts, place="new", max_places=2, at_s=LEASE_S - 1)).reached
    assert (await count(counts, place="new", max_places=2, at_s=LEASE_S)).reached is None
    assert (await count(counts, place="other", max_places=2, at_s=LEASE_S)).reached
    assert (await count(counts, place="other", max_places=2, at_s=20 + LEASE_S)).reached is None


async def test_another_limit_in_the_file_counts_from_then_on(counts: RequestCounts) -> None:
    for _ in range(5):
        await count(counts, requests(5))
    assert (await count(counts, requests(8))).levels == {"requests": 6.0}
    assert (await count(counts, requests(2))).wait_s == 150.0


async def test_a_clock_that_is_behind_refuses_nobody_for_longer(counts: RequestCounts) -> None:
    """Another Redis' after a failover."""
    await count(counts, requests(1), at_s=3600)
    refused = await count(counts, requests(1))
    assert (refused.reached, refused.wait_s) == ("requests", 60.0)
    assert (await count(counts, requests(1), at_s=60)).reached is None


async def test_keys_do_not_count_together_and_expire(counts: RequestCounts, bus: AsyncBus, raw: Any) -> None:
    await counts.count_request(KEY, [requests(1)], place="p", max_places=1, lease_s=LEASE_S)
    other = await counts.count_request("bob", [requests(1)], place="p", max_places=1, lease_s=LEASE_S)
    assert other.reached is None
    assert 55_000 < raw.pttl(bus.names.limit_levels(KEY)) <= 61_000
    assert 25_000 < raw.pttl(bus.names.limit_places(KEY)) <= 30_000
    debt = RateCharge("tokens", 10, 100)
    await counts.settle_requests(KEY, [debt], [])
    assert 590_000 < raw.pttl(bus.names.limit_levels(KEY)) <= 601_000
    assert set(raw.keys()) == {
        name(key) for key in (KEY, "bob") for name in (bus.names.limit_levels, bus.names.limit_places)
    }


async def test_one_command_counts_a_request(counts: RequestCounts, raw: Any) -> None:
    await counts.count_request(KEY, [requests(9)], place="p", lease_s=LEASE_S)
    raw.config_resetstat()
    await counts.count_request(KEY, [requests(9)], place="p", max_places=9, lease_s=LEASE_S)
    calls = {
        name.removeprefix("cmdstat_"): stats["calls"] for name, stats in raw.info("commandstats").items()
    }
    assert calls["evalsha"] == 1
    assert "script|load" not in calls
