"""Real processes, Redis, shared memory and HTTP; vLLM is stood in for (`tests/support/fast`).

Half of the faults happen at a random step of the protocol.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from system_soak.target import Fault, Target
from tests.conftest import embedded_redis
from tests.support.fast.faults import REDIS, Faults
from tests.support.fast.layout import Layout
from tests.support.fast.load import Load
from tests.support.fast.redis_inspection import used_bytes
from tests.support.fast.scenario import COMMON_STEPS, Action, points_of
from tests.support.fast.system import FastSystem
from triptych_common.protocol.steps import Party, Step

LAYOUT = Layout(
    num_encoders=3, num_prefill_decodes=2, num_gateways=2, takeover_idle_ms=2000, encode_s=0.03,
    first_token_timeout_s=20.0,
)  # fmt: skip
LONGEST_STOP_S = 3.0
REACH_LIMIT_S = 1.0
SERVICES = (Party.ENCODER, Party.PREFILL_DECODE, Party.GATEWAY, Party.CACHE_STORE)


@contextmanager
def opened(num_callers: int, seed: int) -> Iterator[tuple[Target, Load]]:
    """The system runs until the block ends."""
    with embedded_redis() as server, FastSystem(server, LAYOUT) as system:
        faults = Faults(system)
        try:
            target = FastTarget(system, faults)
            yield target, Load(target.gateway_urls, num_callers, seed)
        finally:
            faults.close()


class FastTarget:
    """A fault comes when everything runs."""

    engine = "fast: stand-ins for vLLM"
    services: Sequence[Party] = SERVICES
    steps: Sequence[Step] = COMMON_STEPS

    def __init__(self, system: FastSystem, faults: Faults) -> None:
        self._system = system
        self._faults = faults
        self.gateway_urls = [system.url(name) for name in system.names_of(Party.GATEWAY)]

    def draw(self, rng: random.Random) -> Fault:
        party = rng.choice([*self.services, None])
        action = rng.choice(list(Action))
        victim = REDIS if party is None else rng.choice(self._system.names_of(party))
        service = REDIS if party is None else str(party)
        moment = rng.choice(points_of(party, self.steps)) if rng.random() < 0.5 else None
        for_s = rng.uniform(0.2, LONGEST_STOP_S)
        return Fault(action, service, victim, for_s, f"{action} {service}", moment)

    async def at_its_moment(self, fault: Fault, act: Callable[[str], None]) -> str | None:
        if fault.moment is None:
            await asyncio.to_thread(act, fault.victim)
            return fault.victim
        hit: list[str] = []

        def act_there(instance: str) -> None:
            """The process that gets there, if it is of the victim's kind."""
            is_here = fault.victim != REDIS and str(self._system.services[instance].party) == fault.service
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

    def num_restarts(self) -> dict[str, int]:
        return dict(self._system.restarts)

    def memory_bytes(self) -> dict[str, int]:
        return {**self._system.rss_bytes(), "redis used_memory": used_bytes(self._system.redis.url)}

    def log_ends(self, num_lines: int) -> str:
        return str(self._system.log_ends(num_lines))
