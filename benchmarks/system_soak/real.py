"""The system as `./triptych up` starts it: real vLLM on the CPU, a supervisor, an embedded Redis.

An engine that was killed takes tens of seconds. Meanwhile the other one of its kind is spared, and faults go
on elsewhere: at least one of each kind is always alive. The store and Redis, of which there is one, come
back at once. What comes back at once and has just been killed is not killed again: its supervisor would take
that for a fault of its own, and wait longer each time.
"""

import asyncio
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

from system_soak.target import Fault, Target
from tests.support.fast.load import Load
from tests.support.fast.redis_inspection import used_bytes
from tests.support.fast.scenario import Action
from tests.support.real import inspection
from tests.support.real.processes import Part, pids_of, send, slowed
from tests.support.real.questions import Catalogue
from tests.support.real.system import EXACT, System, running_monolith, running_system

TOPOLOGIES = ("e+pd",)  # engines of every role take more memory than most machines of two cores have
NUM_OF_EACH = 2
FIRST_TOKEN_TIMEOUT_S = 30
REQUEST_TIMEOUT_S = 60
CLIENT_LIMIT_S = 80.0  # above every deadline: a request that takes longer hangs
REFUSED_PAUSE_S = 0.5
LEAVE_WITHIN_S = 2.0
LONGEST_STOP_S = 3.0
HEALTHY_LIMIT_S = 120.0
WHOLE_LIMIT_S = 300.0
IDLE_LIMIT_S = REQUEST_TIMEOUT_S + 40.0  # a requester that went elsewhere never acks: its pin ends with it
CALM_S = 60.0  # as the supervisor's, after which its delays begin again
LOOK_S = 0.25
ENGINE_WEIGHT = 3  # their turn comes seldom: one that was killed spares the other one for long
KINDS = ("encoder", "prefill_decode", "gateway", "cache_store", "redis")


@contextmanager
def opened(num_callers: int, seed: int, topology: str) -> Iterator[tuple[Target, Load]]:
    """A monolithic vLLM gives the right answers first; then the system runs until the block ends.

    Args:
        topology: of `TOPOLOGIES`.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        running_monolith(Path(folder)) as monolith,
    ):
        questions = Catalogue.answered_by(monolith, seed)
    options = " ".join(EXACT)
    with running_system(
        f"--encoders={NUM_OF_EACH}", f"--prefill-decodes={NUM_OF_EACH}", f"--encoder-args={options}",
        f"--prefill-decode-args={options}", num_gateways=NUM_OF_EACH,
        TRIPTYCH_FIRST_TOKEN_TIMEOUT_S=str(FIRST_TOKEN_TIMEOUT_S),
        TRIPTYCH_REQUEST_TIMEOUT_S=str(REQUEST_TIMEOUT_S),
    ) as system:  # fmt: skip
        target = RealTarget(system)
        load = Load(
            target.gateway_urls, num_callers, seed, questions,
            limit_s=CLIENT_LIMIT_S, refused_pause_s=REFUSED_PAUSE_S, leave_within_s=LEAVE_WITHIN_S,
        )  # fmt: skip
        yield target, load


class RealTarget:
    """System of real engines; victims are named `NAME/PART`."""

    engine = "vLLM on the CPU, the demo model in float32"
    answering_kinds: tuple[str, ...] = ("prefill_decode",)

    def __init__(self, system: System) -> None:
        self._system = system
        self.gateway_urls: list[str] = inspection.gateway_urls(system, NUM_OF_EACH)
        self._killed: dict[str, tuple[str, int, float]] = {}  # by name: what, pid, Unix seconds
        self._recoveries_s: dict[str, list[float]] = {}
        self._stopped: dict[str, list[int]] = {}

    # ---- faults ----------------------------------------------------------------------------------
    def draw(self, rng: random.Random) -> Fault:
        ready = self._ready()
        by_kind = {kind: [name for name in ready if inspection.kind_of(name) == kind] for kind in KINDS}
        single = ("cache_store", "redis")
        kinds = [each for each in KINDS if by_kind[each] and (each in single or by_kind[each][1:])]
        (kind,) = rng.choices(
            kinds, [ENGINE_WEIGHT if each in inspection.ENGINE_KINDS else 1 for each in kinds]
        )
        name = rng.choice(by_kind[kind])
        part = rng.choice(list(Part)) if kind in inspection.ENGINE_KINDS else Part.HOST
        actions = list(Action)
        if kind not in inspection.ENGINE_KINDS and not self._is_calm(ready[name]):
            actions.remove(Action.KILL)
        action = rng.choice(actions)
        what = f"{action} {kind}" + (f" ({part})" if kind in inspection.ENGINE_KINDS else "")
        return Fault(action, kind, f"{name}/{part}", rng.uniform(0.2, LONGEST_STOP_S), what)

    async def at_its_moment(self, fault: Fault, act: Callable[[str], None]) -> str | None:
        await asyncio.to_thread(act, fault.victim)
        return fault.victim

    def kill(self, victim: str) -> None:
        name, part = victim.split("/")
        pids = self._pids(victim)
        what = f"{inspection.kind_of(name)} ({part})" if part != Part.HOST else inspection.kind_of(name)
        self._killed[name] = (what, self._system.service_pid(name), time.time())
        send(pids, SIGKILL)

    def stop(self, victim: str) -> None:
        self._stopped[victim] = self._pids(victim)
        send(self._stopped[victim], SIGSTOP)

    def go_on(self, victim: str) -> None:
        send(self._stopped.pop(victim), SIGCONT)

    def slowed(self, victim: str) -> AbstractContextManager[None]:
        slow: AbstractContextManager[None] = slowed(self._pids(victim))
        return slow

    def _pids(self, victim: str) -> list[int]:
        name, part = victim.split("/")
        found: list[int] = pids_of(self._system, name, Part(part))
        return found

    # ---- health ----------------------------------------------------------------------------------
    def wait_until_healthy(self) -> None:
        _wait(self._is_healthy, HEALTHY_LIMIT_S, "at least one of each kind serves", self)

    def wait_until_idle(self) -> None:
        _wait(self._is_whole, WHOLE_LIMIT_S, "everybody runs and is registered", self)
        left: dict[str, int] = {}

        def is_idle() -> bool:
            left.clear()
            left.update(self.leftovers())
            return not left

        try:
            _wait(is_idle, IDLE_LIMIT_S, "nothing is left over", self)
        except RuntimeError as error:
            raise RuntimeError(f"left over: {left}\n{error}") from None

    def leftovers(self) -> dict[str, int]:
        try:
            found: dict[str, int] = inspection.leftovers(self._system, self.gateway_urls)
        except inspection.NOT_THERE as error:
            return {repr(error): 1}
        return {what: number for what, number in found.items() if not what.endswith("dead-letters")}

    def _ready(self) -> dict[str, dict[str, Any]]:
        """Services that run, by name; those that were killed only in their next life."""
        ready = {}
        for name, service in self._system.services().items():
            what, dead_pid, killed_at = self._killed.get(name, ("", 0, 0.0))
            if service["state"] != "ready" or service["pid"] == dead_pid:
                continue
            ready[name] = service
            if what:
                self._recoveries_s.setdefault(what, []).append(service["since"] - killed_at)
                del self._killed[name]
        return ready

    def _is_calm(self, service: dict[str, Any]) -> bool:
        return bool(service["num_restarts"] == 0 or time.time() - service["since"] > CALM_S)

    def _is_healthy(self) -> bool:
        kinds = Counter(inspection.kind_of(name) for name in self._ready())
        return all(kinds[kind] for kind in KINDS) and any(map(_serves, self.gateway_urls))

    def _is_whole(self) -> bool:
        everybody = self._ready().keys() == self._system.services().keys()
        return everybody and bool(inspection.is_whole(self._system, self.gateway_urls))

    # ---- figures ---------------------------------------------------------------------------------
    def recoveries_s(self) -> dict[str, list[float]]:
        return self._recoveries_s

    def num_encodes(self) -> int:
        return len(inspection.encodes(self._system))

    def shares(self) -> dict[str, dict[str, int]]:
        return {}  # metrics of an engine end with it

    def num_restarts(self) -> dict[str, int]:
        services = self._system.services()
        return {name: each["num_restarts"] for name, each in services.items() if each["num_restarts"]}

    def memory_bytes(self) -> dict[str, int]:
        memory: dict[str, int] = inspection.rss_bytes(self._system)
        return {**memory, "redis used_memory": used_bytes(inspection.redis_url(self._system))}

    def log_ends(self, num_lines: int) -> str:
        folder = self._system.logs_dir
        ends = {path.stem: path.read_text().splitlines()[-num_lines:] for path in folder.glob("*.log")}
        return "\n".join("\n".join([f"---- {name}", *ends[name]]) for name in sorted(ends))


def _serves(url: str) -> bool:
    try:
        report = inspection.health(url)
    except inspection.NOT_THERE:
        return False
    return report["status"] == "ready" and bool(report["redis"]) and bool(report["encoder_available"])


def _wait(condition: Callable[[], bool], limit_s: float, what: str, target: RealTarget) -> None:
    """Poll `condition`, which is about other processes and cannot be awaited.

    Raises:
        RuntimeError: not in time.
    """
    pause = threading.Event()
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {limit_s} s: {what}\n{target.log_ends(12)}")
        pause.wait(LOOK_S)
