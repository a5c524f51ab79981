"""One request held to its key's limits: what is counted before, what is settled at its end, without Redis."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from tests.support.waiting import until
from triptych_common.coordination import CountResult, RateCharge, RequestCounts
from triptych_common.domain.errors import BusUnavailableError, RequestError
from triptych_gateway.access import key_limiter
from triptych_gateway.access.auth import Caller
from triptych_gateway.access.key_limiter import KeyLimiter
from triptych_gateway.access.key_limits import KeyLimits, RequestDemand
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.settings import AccessSettings

LIMITS = KeyLimits(
    requests_per_minute=10, tokens_per_minute=1000, media_bytes_per_minute=100, max_concurrent_requests=3
)
DEMAND = RequestDemand("m", {"max_tokens": 50}, num_prompt_bytes=40, num_media_bytes=7)
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


@dataclass
class PlayedCounts:
    """FAKE: answers as it is told. The real one: tests/integration/common/coordination."""

    reached: str | None = None
    is_away: bool = False
    asked: list[tuple[str, tuple[RateCharge, ...], int]] = field(default_factory=list)
    settled: list[tuple[str, dict[str, int], list[str]]] = field(default_factory=list)
    renewed: list[tuple[str, ...]] = field(default_factory=list)

    async def count_request(
        self, key_name: str, charges: Sequence[RateCharge], *, place: str, max_places: int, lease_s: float
    ) -> CountResult:
        self.asked.append((key_name, tuple(charges), max_places))
        if self.is_away:
            raise BusUnavailableError("for the test")
        return CountResult(self.reached, 6.0, {charge.rate: float(charge.cost) for charge in charges})

    async def settle_requests(
        self, key_name: str, corrections: Sequence[RateCharge], places: Sequence[str]
    ) -> None:
        if self.is_away:
            raise BusUnavailableError("for the test")
        self.settled.append((key_name, {each.rate: each.cost for each in corrections}, list(places)))

    async def renew_places(self, key_name: str, places: Sequence[str], *, lease_s: float) -> None:
        self.renewed.append(tuple(places))


class Bench:
    def __init__(self) -> None:
        self.counts = PlayedCounts()
        self.headers: dict[str, str] = {}
        self.sent: list[Any] = []
        self.limiter = KeyLimiter(cast("RequestCounts", self.counts), GatewayMetrics(), AccessSettings())

    def hold(self, limits: KeyLimits = LIMITS, demand: RequestDemand = DEMAND) -> Any:
        return self.limiter.hold_request(Caller("alice", limits=limits), limits, demand, self.headers)

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def serve(self, *events: bytes, limits: KeyLimits = LIMITS, demand: RequestDemand = DEMAND) -> None:
        async with self.hold(limits, demand) as charge:
            send = charge.meter(self.send)
            if events:
                await send(dict(START))
            for each in events:
                await send({"type": "http.response.body", "body": each, "more_body": True})
        await self.limiter.close()

    @property
    def corrections(self) -> dict[str, int]:
        ((_, corrections, _),) = self.counts.settled
        return corrections


async def test_log_probabilities_of_what_was_answered_are_charged_in_the_end() -> None:
    bench = Bench()
    demand = RequestDemand("m", {"max_tokens": 100, "top_logprobs": 19}, 200, 0)
    usage = b'{"prompt_tokens": 50, "completion_tokens": 40, "total_tokens": 90}'
    await bench.serve(b'data: {"choices": [], "usage": ' + usage + b"}\n\n", demand=demand)
    ((_, charges, _),) = bench.counts.asked
    assert next(each.cost for each in charges if each.rate == "tokens") == 50 + 100 + 100
    assert bench.corrections == {"tokens": 90 + 40 - 250}


async def test_a_request_that_failed_before_its_answer_took_no_tokens() -> None:
    bench = Bench()
    await bench.serve()
    assert bench.corrections == {"tokens": -60}


async def test_an_answer_that_breaks_off_took_what_was_charged_or_more() -> None:
    bench = Bench()
    await bench.serve(b"data: {}\n\n")
    assert bench.counts.settled[0][1] == {}
    longer = Bench()
    await longer.serve(b"data: {}\n\n" * 80)
    assert longer.corrections == {"tokens": 30}  # 10 of the prompt, 80 events, 60 charged


async def test_requests_of_a_key_are_settled_together_and_their_places_are_free() -> None:
    bench = Bench()
    async with bench.hold(), bench.hold():
        await bench.limiter._renew()
        assert [len(places) for places in bench.counts.renewed] == [2]
    await bench.limiter.close()
    await bench.limiter._renew()
    assert len(bench.counts.renewed) == 1
    ((key_name, corrections, places),) = bench.counts.settled
    assert (key_name, corrections, len(set(places))) == ("alice", {"tokens": -120}, 2)


async def test_a_request_that_is_refused_holds_and_settles_nothing() -> None:
    bench = Bench()
    bench.counts.reached = "requests"
    with pytest.raises(RequestError) as caught:
        await bench.serve()
    assert (caught.value.status_code, caught.value.code) == (429, "rate_limit_exceeded")
    assert caught.value.retry_after_s == 6.0
    assert bench.headers["x-ratelimit-limit-requests"] == "10"
    await bench.limiter.close()
    assert not bench.counts.settled
    assert not bench.limiter._held


async def test_only_keys_with_a_limit_of_tokens_change_what_is_sent() -> None:
    bench = Bench()
    demand = RequestDemand("m", {"stream": True}, 1, 0)
    async with bench.hold(KeyLimits(requests_per_minute=1), demand) as charge:
        assert charge.body is demand.body
        assert charge.meter(bench.send) == bench.send
    async with bench.hold(KeyLimits(tokens_per_minute=9), demand) as charge:
        assert charge.body == {"stream": True, "stream_options": {"include_usage": True}}
    others = replace(demand, takes_stream_options=False)
    async with bench.hold(KeyLimits(tokens_per_minute=9), others) as charge:
        assert charge.body is demand.body


async def test_what_could_not_be_settled_is_settled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_limiter, "RETRY_S", 0.001)
    bench = Bench()
    async with bench.hold():
        bench.counts.is_away = True
    running = asyncio.get_running_loop().create_task(bench.limiter.run())
    await until(lambda: bench.limiter._is_away)
    bench.counts.is_away = False
    await until(lambda: bench.counts.settled)
    assert bench.corrections == {"tokens": -60}
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
