"""Hostile values in every field of every endpoint, for minutes, against a system of real engines."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hostile_bench.processes import Growth, loops_of
from tests.support.hostile.fields import HostileRequest, HostileRequests, targets
from tests.support.hostile.fuzzing import FuzzOutcome, fuzz
from tests.support.hostile.loop_probe import reset_stops
from tests.support.real.system import System
from triptych_cli.settings import DEFAULT_MODEL

MAX_STOP_S = 0.25  # of CPU, of a loop
NUM_AT_ONCE = 4
LOOK_S = 0.5
LOOKS_PER_LINE = 120
WARM_UP = 300  # requests before memory is counted: caches, tables and code that is loaded when it is used


async def fuzz_system(
    system: System, probed: Path, key: str, *, minutes: float, seed: int, settle_s: float
) -> tuple[dict[str, Any], list[str]]:
    """Return the figures, and what is wrong."""
    made, places = HostileRequests(seed, DEFAULT_MODEL.name), targets()
    every_place = itertools.chain.from_iterable(made.shuffled(places) for _ in itertools.repeat(None))
    ends_at = time.monotonic() + 60 * minutes

    def requests(until: float) -> Iterator[HostileRequest]:
        while time.monotonic() < until:
            yield made.request(next(every_place))

    async def send(some: Iterator[HostileRequest], outcome: FuzzOutcome) -> None:
        await fuzz(
            system.base_url.removesuffix("/v1"),
            some,
            seed=seed,
            num_at_once=NUM_AT_ONCE,
            key=key,
            outcome=outcome,
        )

    outcome = FuzzOutcome()
    await send(itertools.islice(requests(ends_at), WARM_UP), outcome)
    growth = Growth.of(system)
    await reset_stops(probed)

    async def watch() -> None:
        """Note memory, and print each minute how far the run is and which faults are new."""
        num_printed = 0
        for look in itertools.count():
            growth.look(system)
            if look % LOOKS_PER_LINE == 0:
                longest = {
                    name: round(max(each.longest_cpu_s, each.longest_lock_s), 3)
                    for name, each in loops_of(system, probed).items()
                }
                print(f"{outcome.statuses.total()} requests; longest stops: {longest}", flush=True)
                for fault in outcome.faults[num_printed:]:
                    print(fault, flush=True)
                num_printed = len(outcome.faults)
            await asyncio.sleep(LOOK_S)

    watching = asyncio.ensure_future(watch())
    await send(requests(ends_at), outcome)
    await asyncio.sleep(settle_s)
    watching.cancel()
    faults = [*outcome.faults, *growth.faults(system)]
    loops = loops_of(system, probed)
    for name, stops in loops.items():
        for each in stops.stops:
            if each["cpu_s"] > MAX_STOP_S:
                under_way = "\n    ".join(outcome.at(each["at"], each["wall_s"])[:6])
                stack = "\n    ".join(each["stack"])
                faults.append(
                    f"{name} stopped for {each['cpu_s']:.3f} s of CPU:\n    {under_way}\n    {stack}"
                )
    figures = {
        "seed": seed,
        "requests": outcome.statuses.total(),
        "statuses": dict(sorted(outcome.statuses.items())),
        "fields": f"{len(outcome.fields)} of {len({each.field for each in places})}",
        "slowest": str(outcome.slowest),
        "loops": {name: _without_stops(stops) for name, stops in loops.items()},
        "memory": growth.figures(),
    }
    return figures, faults


def _without_stops(stops: Any) -> dict[str, float]:
    return {
        name: round(value, 3)
        for name, value in asdict(stops).items()
        if name in ("longest_cpu_s", "longest_wall_s", "longest_lock_s")
    }
