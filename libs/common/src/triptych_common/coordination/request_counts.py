"""Count requests of an API key against its limits, over all gateways.

Rates are leaky buckets (`lua/leaky_bucket.lua` has the algorithm and its source): a bucket that is empty
takes a whole minute's worth at once, and what was taken leaks out evenly. Requests in flight hold a place
each, by a lease: a gateway that dies gives its places back when the leases end. One script decides and
counts, on Redis' clock, so that of many requests at once exactly as many pass as the limits allow.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.redis_client.commands import run_command
from triptych_common.redis_client.scripts import LuaScript, Value, load_script

PRELUDE = files(__package__).joinpath("lua", "leaky_bucket.lua").read_text("utf-8")
COUNT, SETTLE, RENEW = (
    load_script(__package__, name, prelude=PRELUDE)
    for name in ("count_request", "settle_requests", "renew_places")
)


class RateCharge(NamedTuple):
    """Cost of a request under one rate; a cost above the limit can never pass."""

    rate: str  # e.g. "requests"
    limit: int  # a minute
    cost: int


@dataclass(frozen=True, slots=True)
class CountResult:
    reached: str | None  # the limit that refuses it: a rate, or "concurrent_requests"; None: it was counted
    wait_s: float  # until the rate has room for it; 0: not known
    levels: dict[str, float]  # by rate: used part of its limit, with this request if it was counted


class RequestCounts:
    """Counts of all keys of one deployment. On BusUnavailableError a request may have been counted."""

    def __init__(self, bus: AsyncBus) -> None:
        self._names = bus.names
        self._registered = {each: bus.client.register_script(each.text) for each in (COUNT, SETTLE, RENEW)}

    async def count_request(
        self,
        key_name: str,
        charges: Sequence[RateCharge],
        *,
        place: str,
        max_places: int = 0,
        lease_s: float,
        now_us: int | None = None,
    ) -> CountResult:
        """Count one request on all `charges` and take it a place, or do nothing if a limit is reached.

        Args:
            place: a name that no other request has.
            max_places: requests in flight; 0: any number, and no place is taken.
            now_us: for tests; None: Redis' clock.
        """
        reply = await self._run(
            COUNT, key_name, _flat(charges),
            now_us=_clock(now_us), place=place, lease_ms=_ms(lease_s), max_places=max_places,
        )  # fmt: skip
        reached, wait_us, *levels = (each.decode() for each in reply)
        return CountResult(
            reached or None,
            int(wait_us) / 1e6,
            {charge.rate: float(level) for charge, level in zip(charges, levels, strict=True)},
        )

    async def settle_requests(
        self,
        key_name: str,
        corrections: Sequence[RateCharge],
        places: Sequence[str],
        *,
        now_us: int | None = None,
    ) -> None:
        """Free the `places` of requests that ended, and apply `corrections` to their charges.

        A correction's cost may be negative; it is charged whatever the limit is.
        """
        await self._run(
            SETTLE, key_name, [*_flat(corrections), *places],
            now_us=_clock(now_us), num_rates=len(corrections),
        )  # fmt: skip

    async def renew_places(
        self, key_name: str, places: Sequence[str], *, lease_s: float, now_us: int | None = None
    ) -> None:
        await self._run(RENEW, key_name, places, now_us=_clock(now_us), lease_ms=_ms(lease_s))

    async def _run(self, script: LuaScript, key_name: str, rest: Iterable[Value], **named: Value) -> Any:
        keys = [self._names.limit_levels(key_name), self._names.limit_places(key_name)]
        arguments = script.arguments(rest, **named)
        return await run_command(script.name, lambda: self._registered[script](keys=keys, args=arguments))


def _flat(charges: Iterable[RateCharge]) -> list[Value]:
    return [part for charge in charges for part in charge]


def _clock(now_us: int | None) -> Value:
    return "" if now_us is None else now_us


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
