"""Soak of the whole system: 20 callers, and a random fault whenever it is healthy again.

    python benchmarks/soak_system.py [--minutes N] [--seed N] [--json FILE]

Real processes, Redis, shared memory and HTTP; vLLM is stood in for by engines whose answer follows from
the bytes of the tensors (`tests/support/fast`). kill -9, SIGSTOP and slow-down of every service and of
Redis, half of them at a random step of the protocol. Exit status 1 if there was a wrong answer, a request
that hung, an error that is not documented, or anything left over in the end; or if less than 99 % of the
requests that had no token yet when a prefill_decode died were answered.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.fast.faults import REDIS, Faults  # noqa: E402
from support.fast.layout import Layout  # noqa: E402
from support.fast.load import RIGHT, Load  # noqa: E402
from support.fast.redis_look import used_bytes  # noqa: E402
from support.fast.scenario import Action, Point, points_of  # noqa: E402
from support.fast.system import FastSystem  # noqa: E402

from tests.conftest import embedded_redis  # noqa: E402
from triptych_common.protocol.steps import Party  # noqa: E402

LAYOUT = Layout(
    num_encoders=3, num_prefill_decodes=2, num_gateways=2, takeover_idle_ms=2000, encode_s=0.03,
    first_token_timeout_s=20.0,
)  # fmt: skip
FAULT_INTERVAL_S = 5.0
LONGEST_STOP_S = 3.0
REACH_LIMIT_S = 1.0
GOAL_SUCCESS = 0.99
SERVICE_OF: dict[Party | None, str] = {
    Party.ENCODER: "encoder", Party.PREFILL_DECODE: "prefill_decode", Party.GATEWAY: "gateway",
    Party.CACHE_STORE: "cache_store",
}  # fmt: skip


class Tormentor:
    """One fault after the other, each when the system is whole again."""

    def __init__(self, system: FastSystem, faults: Faults, load: Load, seed: int) -> None:
        self._system = system
        self._faults = faults
        self._deaths = load.tally.deaths
        self._random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.longest_recovery_s = 0.0

    async def run(self, seconds: float) -> None:
        """For so long.

        Raises:
            RuntimeError: the system did not become whole.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            started = time.monotonic()
            await self._one_fault()
            began_to_heal = time.monotonic()
            await asyncio.to_thread(self._system.wait_until_whole)
            now = time.monotonic()
            self.longest_recovery_s = max(self.longest_recovery_s, now - began_to_heal)
            pause_s = self._random.uniform(0.0, FAULT_INTERVAL_S) - (now - started)
            await asyncio.sleep(max(0.0, min(pause_s, end - now)))  # a time of health between faults

    async def _one_fault(self) -> None:
        rng = self._random
        party = rng.choice([*SERVICE_OF, None])
        action = rng.choice(list(Action))
        victim = REDIS if party is None else rng.choice(self._system.names_of(party))
        at_step = rng.random() < 0.5
        self.counts[f"{action} {SERVICE_OF.get(party, REDIS)}"] += 1
        for_s = rng.uniform(0.2, LONGEST_STOP_S)
        if at_step:
            await self._at_a_step(rng.choice(points_of(party)), victim, party, action, for_s)
        else:
            await self._now(victim, party, action, for_s)

    async def _at_a_step(
        self, point: Point, victim: str, party: Party | None, action: Action, for_s: float
    ) -> None:
        """Whoever gets there, if it is one of the victim's kind."""
        hit: list[str] = []

        def act(instance: str) -> None:
            is_here = party is not None and self._system.services[instance].party is party
            hit.append(instance if is_here else victim)
            self._begin(hit[0], party, action)

        with self._faults.at(point.step.name, point.moment, act) as reached:
            await asyncio.to_thread(reached.wait, REACH_LIMIT_S)
        if hit:
            await self._go_through(hit[0], action, for_s)

    async def _now(self, victim: str, party: Party | None, action: Action, for_s: float) -> None:
        await asyncio.to_thread(self._begin, victim, party, action)
        await self._go_through(victim, action, for_s)

    def _begin(self, victim: str, party: Party | None, action: Action) -> None:
        if action is Action.KILL:
            self._deaths.setdefault(SERVICE_OF.get(party, REDIS), []).append(time.monotonic())
            self._faults.kill(victim)
        elif action is Action.STOP:
            self._faults.stop(victim)

    async def _go_through(self, victim: str, action: Action, for_s: float) -> None:
        if action is Action.STOP:
            await asyncio.sleep(for_s)
            self._faults.go_on(victim)
        elif action is Action.SLOW:
            with ExitStack() as slowed:
                slowed.enter_context(self._faults.slowed(victim))
                await asyncio.sleep(for_s)


async def wear_out(system: FastSystem, faults: Faults, options: argparse.Namespace) -> dict[str, Any]:
    """The report; its `faults` say what was wrong."""
    urls = [system.url(name) for name in system.names_of(Party.GATEWAY)]
    load = Load(urls, options.callers, options.seed)
    tormentor = Tormentor(system, faults, load, options.seed + 1)
    memory = {"start": _memory(system)}
    done = asyncio.Event()
    started = time.monotonic()
    wrong: list[str] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run_until(done))
        try:
            await tormentor.run(options.minutes * 60)
        except RuntimeError as error:
            wrong.append(str(error))
        finally:
            done.set()
    elapsed_s = time.monotonic() - started
    leftovers = await asyncio.to_thread(_leftovers, system, wrong)
    memory["end"] = _memory(system)
    tally = load.tally
    waited = tally.without_token_at_death_of("prefill_decode")
    wrong += tally.faults[:50]
    if waited[RIGHT] < GOAL_SUCCESS * waited.total():
        wrong.append(f"a prefill_decode died, and of the requests without a token became: {dict(waited)}")
    if not tally.outcomes["right"]:
        wrong.append("nothing was answered")
    return {
        "engine": "fast: stand-ins for vLLM",
        "seed": options.seed,
        "elapsed_s": elapsed_s,
        "num_callers": options.callers,
        "num_requests": sum(tally.outcomes.values()),
        "outcomes": dict(tally.outcomes.most_common()),
        "latency": tally.latencies(),
        "num_faults": sum(tormentor.counts.values()),
        "faults_injected": dict(tormentor.counts.most_common()),
        "longest_recovery_s": tormentor.longest_recovery_s,
        "without_token_when_prefill_decode_died": dict(waited),
        "num_encodes": sum(system.tally().num_encodes.values()),
        "restarts": dict(system.restarts),
        "left_over": leftovers,
        "memory_bytes": memory,
        "faults": wrong,
    }


def _leftovers(system: FastSystem, wrong: list[str]) -> dict[str, int]:
    try:
        system.wait_until_whole()
        system.wait_until_idle(allowed=lambda what: what.endswith("dead-letters"))
    except RuntimeError as error:
        wrong.append(str(error))
    left_over: dict[str, int] = system.leftovers()
    return left_over


def _memory(system: FastSystem) -> dict[str, int]:
    return {**system.rss_bytes(), "redis used_memory": used_bytes(system.redis.url)}


def tell(report: dict[str, Any]) -> None:
    """For people."""
    for key in ("engine", "num_requests", "outcomes", "latency", "num_faults", "faults_injected"):
        print(f"{key:<22} {report[key]}")
    died = report["without_token_when_prefill_decode_died"]
    print(f"{'a prefill_decode died':<22} of the requests without a token became: {died}")
    print(f"{'longest recovery':<22} {report['longest_recovery_s']:.1f} s")
    print(f"{'left over':<22} {report['left_over'] or 'nothing'}")
    for when, memory in report["memory_bytes"].items():
        megabytes = {name: round(number / (1 << 20), 1) for name, number in memory.items()}
        print(f"{'MiB at the ' + when:<22} {megabytes}")
    for fault in report["faults"]:
        print(f"FAULT {fault}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--callers", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with embedded_redis() as server, FastSystem(server, LAYOUT) as system:
        faults = Faults(system)
        try:
            report = asyncio.run(wear_out(system, faults, options))
        finally:
            faults.close()
        if report["faults"]:
            print(system.log_ends(40), file=sys.stderr)
    tell(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
