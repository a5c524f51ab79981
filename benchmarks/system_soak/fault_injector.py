"""One fault after the other, each when the system is healthy again."""

import asyncio
import random
import time
from collections import Counter
from contextlib import ExitStack

from system_soak.target import Fault, Target
from tests.support.fast.scenario import Action

FAULT_INTERVAL_S = 5.0
MIN_FAULTS = 3  # however long they take: a short soak on a slow machine is one, too


class FaultInjector:
    """Injects faults into `target`; `deaths` gets the times of kills by kind of service (monotonic s)."""

    def __init__(self, target: Target, deaths: dict[str, list[float]], seed: int) -> None:
        self._target = target
        self._deaths = deaths
        self._random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.history: list[tuple[float, str]] = []  # when (monotonic seconds), and what
        self.longest_recovery_s = 0.0

    async def run(self, seconds: float, num_faults: int = MIN_FAULTS) -> None:
        """Inject faults for `seconds`, and at least `num_faults`.

        Raises:
            RuntimeError: the system did not become healthy.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end or self.counts.total() < num_faults:
            started = time.monotonic()
            await self._one_fault(self._target.draw(self._random))
            recovery_began = time.monotonic()
            await asyncio.to_thread(self._target.wait_until_healthy)
            now = time.monotonic()
            self.longest_recovery_s = max(self.longest_recovery_s, now - recovery_began)
            pause_s = self._random.uniform(0.0, FAULT_INTERVAL_S) - (now - started)
            await asyncio.sleep(max(0.0, min(pause_s, end - now)))  # no fault meanwhile

    async def _one_fault(self, fault: Fault) -> None:
        self.counts[fault.what] += 1
        self.history.append((time.monotonic(), f"{fault.what} at {fault.moment or 'any moment'}"))
        victim = await self._target.at_its_moment(fault, lambda victim: self._begin(victim, fault))
        if victim is None:
            return
        if fault.action is Action.STOP:
            await asyncio.sleep(fault.for_s)
            self._target.go_on(victim)
        elif fault.action is Action.SLOW:
            with ExitStack() as slow:
                slow.enter_context(self._target.slowed(victim))
                await asyncio.sleep(fault.for_s)

    def _begin(self, victim: str, fault: Fault) -> None:
        if fault.action is Action.KILL:
            self._deaths.setdefault(fault.service, []).append(time.monotonic())
            self._target.kill(victim)
        elif fault.action is Action.STOP:
            self._target.stop(victim)
