"""Limits of API keys, which all gateways count together in Redis.

One round trip before a request of a limited key, and none for others. The actual cost is known at the
request's end and settled in the background, for many requests of a key at once. While Redis is away, requests
are served uncounted or refused, as the operator has chosen; one request per second tries Redis.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from triptych_common.coordination import CountResult, RateCharge, RequestCounts
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.access.answer_usage import AnswerUsage, Send, asking_for_usage
from triptych_gateway.access.auth import Caller
from triptych_gateway.access.key_limits import (
    MEDIA_BYTES,
    REQUESTS,
    TOKENS,
    KeyLimits,
    RequestDemand,
    limit_reached,
    rate_headers,
)
from triptych_gateway.endpoints.answer_cost import BYTES_PER_TOKEN
from triptych_gateway.errors import unavailable
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.settings import AccessSettings

log = get_logger(__name__)

LEASE_S = 30.0  # of a place: within it the places of a dead gateway are free again
RENEW_S = 10.0
RETRY_S = 1.0  # while Redis is away
MAX_PLACES = 1000  # given back by one command


class RequestCharge:
    """Charge and actual cost of one request, from `KeyLimiter.hold_request`."""

    def __init__(self, limits: KeyLimits, demand: RequestDemand) -> None:
        self._prompt_tokens = demand.num_prompt_bytes // BYTES_PER_TOKEN
        self._media_bytes = demand.num_media_bytes
        self._cost = demand.cost
        self._charges = demand.charges(limits)
        self._usage: AnswerUsage | None = None
        self._has_begun = False
        self.body = demand.body
        """Body to send instead of the demand's."""
        if limits.tokens_per_minute is not None:
            is_added = False
            if demand.takes_stream_options:
                self.body, is_added = asking_for_usage(demand.body)
            self._usage = AnswerUsage(drops_usage_event=is_added)

    @property
    def charges(self) -> tuple[RateCharge, ...]:
        return self._charges

    def meter(self, send: Send) -> Send:
        if self._usage is None:
            return send
        metered = self._usage.meter(send)

        async def noting_start(message: MutableMapping[str, Any]) -> None:
            self._has_begun = True
            await metered(message)

        return noting_start

    def on_media(self, num_bytes: int) -> None:
        """Record the bytes of all media of the request, also those that its body did not hold."""
        self._media_bytes = num_bytes

    def corrections(self) -> tuple[RateCharge, ...]:
        taken = {REQUESTS: 1, TOKENS: self._taken_tokens(), MEDIA_BYTES: self._media_bytes}
        differences = (charge._replace(cost=taken[charge.rate] - charge.cost) for charge in self._charges)
        return tuple(each for each in differences if each.cost)

    def _taken_tokens(self) -> int:
        if self._usage is None or not self._has_begun:
            return 0
        if self._usage.num_tokens is not None:
            answer = self._usage.num_answer_tokens
            return self._usage.num_tokens + self._cost.extra_tokens(self._usage.num_tokens - answer, answer)
        charged = next(charge.cost for charge in self._charges if charge.rate == TOKENS)
        return max(charged, self._prompt_tokens + self._usage.num_events)  # it broke off


@dataclass(slots=True)
class _Settlement:
    corrections: dict[str, RateCharge] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)

    def add(self, corrections: tuple[RateCharge, ...], places: list[str]) -> None:
        for each in corrections:
            before = self.corrections.get(each.rate)
            self.corrections[each.rate] = each._replace(cost=each.cost + (before.cost if before else 0))
        self.places += places


class KeyLimiter:
    """Limiter of one gateway; `run` must run. Callers without a name have no limits."""

    def __init__(self, counts: RequestCounts, metrics: GatewayMetrics, settings: AccessSettings) -> None:
        self._counts = counts
        self._metrics = metrics
        self._timeout_s = settings.limits_timeout_s
        self._fails_open = settings.limits_without_redis == "open"
        self._is_away = False
        self._ask_again_at = float("-inf")
        self._held: defaultdict[str, set[str]] = defaultdict(set)  # places by key
        self._ended: defaultdict[str, _Settlement] = defaultdict(_Settlement)
        self._has_ended = asyncio.Event()

    @asynccontextmanager
    async def hold_request(
        self, caller: Caller, limits: KeyLimits, demand: RequestDemand, headers: MutableMapping[str, str]
    ) -> AsyncIterator[RequestCharge]:
        """Count a request, and hold its place while the block runs.

        Args:
            limits: limits of the caller's key.
            headers: headers of any answer; those about limits are added.

        Raises:
            RequestError: 404, the key may not use the model; 429, a limit is reached; 503, limits cannot
                be counted.
        """
        limits.check_model(demand.model)
        charge = RequestCharge(limits, demand)
        if not limits.is_counted:
            yield charge
            return
        key_name, place = caller.key_name or "", uuid4().hex
        places, corrections = list[str](), tuple[RateCharge, ...]()
        try:
            counted = None
            if self._may_ask():
                places = [place] if limits.max_concurrent_requests is not None else []
                counted = await self._count(key_name, limits, charge, place)
            if counted is not None:
                headers.update(rate_headers(limits, counted.levels))
                if counted.reached is not None:
                    places = []
                    self._metrics.limited_requests.labels(counted.reached).inc()
                    raise limit_reached(limits, counted.reached, counted.wait_s)
                self._held[key_name].update(places)
            elif not self._fails_open:
                raise unavailable("limits_unavailable", "the limits of this API key cannot be checked")
            try:
                yield charge
            finally:
                corrections = () if counted is None else charge.corrections()
        finally:
            self._on_end(key_name, corrections, places)

    async def run(self) -> None:
        """Settle ended requests and renew leases, for ever."""
        loop = asyncio.get_running_loop()
        renew_at = loop.time() + RENEW_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(renew_at):
                    await self._has_ended.wait()
            try:
                await self._settle()
                if loop.time() >= renew_at:
                    renew_at = loop.time() + RENEW_S
                    await self._renew()
            except BusUnavailableError as error:
                self._on_away(error)
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Settle ended requests after the last one, as far as Redis takes it at once."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._settle()
        except (BusUnavailableError, TimeoutError):
            return

    def _may_ask(self) -> bool:
        """Return whether to call Redis: while it is away, only one request now and then does."""
        now = asyncio.get_running_loop().time()
        if now < self._ask_again_at:
            return False
        if self._is_away:
            self._ask_again_at = now + max(RETRY_S, self._timeout_s)  # for the others
        return True

    async def _count(
        self, key_name: str, limits: KeyLimits, charge: RequestCharge, place: str
    ) -> CountResult | None:
        """Count a request; None if Redis has not answered, although it may have counted."""
        try:
            async with asyncio.timeout(self._timeout_s):
                counted = await self._counts.count_request(
                    key_name,
                    charge.charges,
                    place=place,
                    max_places=limits.max_concurrent_requests or 0,
                    lease_s=LEASE_S,
                )
        except (BusUnavailableError, TimeoutError) as error:
            self._on_away(error)
            return None
        if self._is_away:
            self._is_away, self._ask_again_at = False, float("-inf")
            log.info("limits of API keys are counted again")
        return counted

    def _on_away(self, error: Exception) -> None:
        self._ask_again_at = asyncio.get_running_loop().time() + RETRY_S
        if not self._is_away:
            self._is_away = True
            log.warning("limits of API keys not counted", error=repr(error), fails_open=self._fails_open)

    def _on_end(self, key_name: str, corrections: tuple[RateCharge, ...], places: list[str]) -> None:
        held = self._held[key_name]
        held.difference_update(places)
        if not held:
            del self._held[key_name]
        if corrections or places:
            self._ended[key_name].add(corrections, places)
            self._has_ended.set()

    async def _settle(self) -> None:
        """Settle the requests that ended until now; leases are renewed however many end meanwhile."""
        for key_name in tuple(self._ended):
            settlement = self._ended.pop(key_name)
            corrections, places = tuple(settlement.corrections.values()), settlement.places
            now, later = places[:MAX_PLACES], places[MAX_PLACES:]
            try:
                await self._counts.settle_requests(key_name, corrections, now)
            except BaseException:
                self._ended[key_name].add(corrections, places)
                raise
            if later:
                self._ended[key_name].add((), later)
        if not self._ended:
            self._has_ended.clear()

    async def _renew(self) -> None:
        for key_name, places in tuple(self._held.items()):
            await self._counts.renew_places(key_name, tuple(places), lease_s=LEASE_S)
