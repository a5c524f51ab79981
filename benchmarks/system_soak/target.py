"""A system under the soak, as the soak sees it."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from tests.support.fast.scenario import Action


@dataclass(frozen=True)
class Fault:
    """A fault of one service, or of Redis."""

    action: Action
    service: str  # the kind: encoder, prefill_decode, decode, gateway, cache_store, redis, ..., network
    victim: str
    for_s: float  # of a stop and of slowness
    what: str  # for the count of such faults
    moment: Any = None  # of the target's own: when it is to happen


class Target(Protocol):
    """A running system with at least two of each service that has no other remedy than another one."""

    engine: str  # for the report
    gateway_urls: list[str]
    answering_kinds: tuple[str, ...]  # of the services that answer, or do a part of it

    def draw(self, rng: random.Random) -> Fault:
        """A fault that may happen now."""

    async def at_its_moment(self, fault: Fault, act: Callable[[str], None]) -> str | None:
        """Call `act` with the victim; returns it. None: the moment did not come."""

    def kill(self, victim: str) -> None:
        """kill -9; its supervisor starts it again."""

    def stop(self, victim: str) -> None: ...

    def go_on(self, victim: str) -> None: ...

    def slowed(self, victim: str) -> AbstractContextManager[None]:
        """A process gets little time, or a network is disturbed, until the block ends."""

    def wait_until_healthy(self) -> None:
        """Wait until the next fault may come.

        Raises:
            RuntimeError: not in time.
        """

    def wait_until_idle(self) -> None:
        """Whole, and nothing is left of any request.

        Raises:
            RuntimeError: not in time; what is left.
        """

    def leftovers(self) -> dict[str, int]:
        """Counts of what is left of requests; empty if nothing is."""

    def recoveries_s(self) -> dict[str, list[float]]:
        """Seconds until victims were ready again, by kind."""

    def num_encodes(self) -> int:
        """Number of encodes that encoders ran."""

    def shares(self) -> dict[str, dict[str, int]]:
        """Requests by kind of instance, with those that it encoded itself, and those whose media its KV cache
        held."""

    def num_restarts(self) -> dict[str, int]:
        """Number of restarts by instance."""

    def memory_bytes(self) -> dict[str, int]:
        """Memory of each service, and of Redis."""

    def log_ends(self, num_lines: int) -> str: ...
