"""Real processes, Redis, shared memory and HTTP; vLLM is stood in for (`tests/support/fast`).

Half of the faults happen at a random step of the protocol.

`e+pd`: encoders and instances that prefill and decode. `all`: instances of every role side by side; one of
the gateways has media encoded by those that have a vision tower, the other one by encoders.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from system_soak.target import Fault, Target
from tests.conftest import embedded_redis
from tests.support.fast.faults import REDIS, Faults
from tests.support.fast.layout import Layout
from tests.support.fast.load import Load
from tests.support.fast.processes.forkserver import ServiceProcess
from tests.support.fast.redis_inspection import used_bytes
from tests.support.fast.scenario import COMMON_STEPS, Action, Point, points_of
from tests.support.fast.system import FastSystem
from tests.support.protocol_steps import STAGE_STEPS, Party, Step

LAYOUTS = {
    "e+pd": Layout(
        num_encoders=3, num_prefill_decodes=2, num_gateways=2, takeover_idle_ms=2000, encode_s=0.03,
        first_token_timeout_s=20.0,
    ),
    "all": Layout(
        num_encoders=2, num_prefill_decodes=1, num_prefills=1, num_decodes=2, num_encode_prefills=1,
        num_encode_prefill_decodes=1, num_gateways=2, takeover_idle_ms=2000, encode_s=0.03,
        first_token_timeout_s=20.0, own_options={"gateway-1": ("--encode-decision=local",)},
    ),
}  # fmt: skip
"""Two of everything that has no other remedy: whole requests and pairs are each other's."""
TOPOLOGIES = tuple(LAYOUTS)
LONGEST_STOP_S = 3.0
REACH_LIMIT_S = 1.0
LANGUAGE_KINDS = ("prefill_decode", "prefill", "decode", "encode_prefill", "encode_prefill_decode")
KINDS = ("encoder", *LANGUAGE_KINDS, "gateway", "cache_store", "store", "fabric")


@contextmanager
def opened(num_callers: int, seed: int, topology: str) -> Iterator[tuple[Target, Load]]:
    """The system runs until the block ends.

    Args:
        topology: of `TOPOLOGIES`.
    """
    with embedded_redis() as server, FastSystem(server, LAYOUTS[topology]) as system:
        faults = Faults(system)
        try:
            target = FastTarget(system, faults)
            yield target, Load(target.gateway_urls, num_callers, seed)
        finally:
            faults.close()


class FastTarget:
    """A fault comes when everything runs."""

    engine = "fast: stand-ins for vLLM"
    steps: Sequence[Step] = COMMON_STEPS

    def __init__(self, system: FastSystem, faults: Faults) -> None:
        self._system = system
        self._faults = faults
        self._by_kind: dict[str, list[ServiceProcess]] = defaultdict(list)
        for service in system.services.values():
            self._by_kind[service.kind].append(service)
        self._kinds = [kind for kind in KINDS if kind in self._by_kind]
        self.answering_kinds = tuple(kind for kind in self._kinds if kind in LANGUAGE_KINDS)
        self.gateway_urls = [system.url(name) for name in system.names_of(Party.GATEWAY)]

    def draw(self, rng: random.Random) -> Fault:
        kind = rng.choice([*self._kinds, REDIS])
        action = rng.choice(list(Action))
        service = None if kind == REDIS else rng.choice(self._by_kind[kind])
        victim, party = (REDIS, None) if service is None else (service.name, service.party)
        moment = rng.choice(self._points_of(party)) if rng.random() < 0.5 else None
        for_s = rng.uniform(0.2, LONGEST_STOP_S)
        return Fault(action, kind, victim, for_s, f"{action} {kind}", moment)

    def _points_of(self, party: Party | None) -> list[Point]:
        if not self._system.names_of(Party.DECODE):
            return points_of(party, self.steps)
        of_items = Party.PREFILL_DECODE if party is Party.PREFILL else party  # towards encoders and store
        return [*points_of(of_items), *points_of(party, STAGE_STEPS)]

    async def at_its_moment(self, fault: Fault, act: Callable[[str], None]) -> str | None:
        if fault.moment is None:
            await asyncio.to_thread(act, fault.victim)
            return fault.victim
        hit: list[str] = []

        def act_there(instance: str) -> None:
            """The process that gets there, if it is of the victim's kind."""
            is_here = self._system.services[instance].kind == fault.service
            hit.append(instance if is_here else fault.victim)
            act(hit[0])

        with self._faults.at(fault.moment.step.name, fault.moment.moment, act_there) as reached:
            await asyncio.to_thread(reached.wait, REACH_LIMIT_S)
        return hit[0] if hit else None

    def kill(self, victim: str) -> None:
        self._faults.kill(victim)

    def stop(self, victim: str) -> None:
        self._faults.stop(victim)

    def go_on(self, victim: str) -> None:
        self._faults.go_on(victim)

    def slowed(self, victim: str) -> AbstractContextManager[None]:
        slow: AbstractContextManager[None] = self._faults.slowed(victim)
        return slow

    def wait_until_healthy(self) -> None:
        self._system.wait_until_whole()

    def wait_until_idle(self) -> None:
        self._system.wait_until_whole()
        self._system.wait_until_idle(allowed=lambda what: what.endswith("dead-letters"))

    def leftovers(self) -> dict[str, int]:
        found: dict[str, int] = self._system.leftovers()
        return found

    def recoveries_s(self) -> dict[str, list[float]]:
        return {}

    def num_encodes(self) -> int:
        return sum(self._system.tally().num_encodes.values())

    def shares(self) -> dict[str, dict[str, int]]:
        tally = self._system.tally()
        return {
            kind: {
                "requests": sum(tally.served[service.name] for service in self._by_kind[kind]),
                "encoded_itself": sum(tally.local[service.name] for service in self._by_kind[kind]),
                "from_held_prefixes": sum(tally.held[service.name] for service in self._by_kind[kind]),
            }
            for kind in self.answering_kinds
        }

    def num_restarts(self) -> dict[str, int]:
        return dict(self._system.restarts)

    def memory_bytes(self) -> dict[str, int]:
        return {**self._system.rss_bytes(), "redis used_memory": used_bytes(self._system.redis.url)}

    def log_ends(self, num_lines: int) -> str:
        return str(self._system.log_ends(num_lines))
