"""System as in `fast`, on three hosts: each has a store and a fabric agent, and Redis is on a fourth.

Half of the faults are of the network: cuts between two hosts or from a host to Redis, in one direction or
both, losses, a slow host. Half of these begin at a random step between hosts.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from system_soak.fast import FastTarget
from system_soak.target import Fault, Target
from tests.support.fast.faults import Faults
from tests.support.fast.load import Load
from tests.support.fast.scenario import COMMON_STEPS, Action
from tests.support.hosts.fabric_points import fabric_points
from tests.support.hosts.layout import CONTROL, HostsLayout, Place
from tests.support.hosts.system import HostsSystem, running_hosts
from tests.support.protocol_steps import FABRIC_STEPS

LAYOUT = HostsLayout(
    places={
        "a": Place(num_encoders=2, num_gateways=1),
        "b": Place(num_encoders=1, num_prefill_decodes=1, num_gateways=1),
        "c": Place(num_prefill_decodes=2),
    },
    takeover_idle_ms=2000,
    encode_s=0.03,
    first_token_timeout_s=20.0,
)
TOPOLOGIES = ("e+pd",)
NETWORK = "network"
LOSS = 0.02
SLOW_BITS = 10_000_000
LONGEST_S = 6.0  # of a fault of the network: longer than agents wait for each other
LONG_SHARE, LONG_S = 0.02, 30.0


@contextmanager
def opened(num_callers: int, seed: int, topology: str) -> Iterator[tuple[Target, Load]]:
    """The system runs until the block ends. `topology`: of `TOPOLOGIES`."""
    with running_hosts(LAYOUT) as system:
        faults = Faults(system)
        try:
            target = HostsTarget(system, faults)
            yield target, Load(target.gateway_urls, num_callers, seed)
        finally:
            faults.close()


class HostsTarget(FastTarget):
    """A fault of the network has a victim such as `cut a b`; see `_disturb`."""

    engine = "hosts: stand-ins for vLLM on three hosts"
    steps = (*COMMON_STEPS, *FABRIC_STEPS)

    def __init__(self, system: HostsSystem, faults: Faults) -> None:
        super().__init__(system, faults)
        self._network = system.network
        self._hosts = list(system.layout.places)

    def draw(self, rng: random.Random) -> Fault:
        if rng.random() < 0.5:
            return super().draw(rng)
        first, second = rng.sample([*self._hosts, CONTROL], 2)
        what = rng.choice(("cut", "cut-one-way", "lossy", "slow"))
        moment = rng.choice(fabric_points()) if rng.random() < 0.5 else None
        for_s = LONG_S if rng.random() < LONG_SHARE else rng.uniform(0.2, LONGEST_S)
        return Fault(Action.SLOW, NETWORK, f"{what} {first} {second}", for_s, f"network {what}", moment)

    async def at_its_moment(self, fault: Fault, act: Callable[[str], None]) -> str | None:
        if fault.service != NETWORK:
            found: str | None = await super().at_its_moment(fault, act)
            return found

        def disturb(_: str) -> None:
            self._disturb(fault.victim)

        reached = await super().at_its_moment(fault, disturb)
        return None if reached is None else fault.victim

    @contextmanager
    def slowed(self, victim: str) -> Iterator[None]:
        if " " not in victim:
            with super().slowed(victim):
                yield
            return
        try:
            yield  # since its moment
        finally:
            self._network.mend_all()

    def _disturb(self, what: str) -> None:
        kind, first, second = what.split()
        match kind:
            case "cut":
                self._network.cut(first, second)
            case "cut-one-way":
                self._network.cut(first, second, both_ways=False)
            case "lossy":
                self._network.set_loss(first, second, LOSS)
                self._network.set_loss(second, first, LOSS)
            case _:
                self._network.set_rate(first, SLOW_BITS)
