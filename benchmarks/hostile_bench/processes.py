"""Processes of a running system: their memory, those that have ended, and the stops of their loops."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.hostile.loop_probe import LoopStops, read_stops
from tests.support.real.system import System

MAX_LEFT_MIB = 256  # that a process may keep
HOST = "host"
ROLES = {
    "EngineCore": "EngineCore",
    "grammars.compile_server": "compile server",
    "decoding.child": "decoding",
}
"""Names of a service's other processes, by a part of their command."""
LOOPS_OF = ("gateway", "prefill_decode")  # services whose loops all callers share


@dataclass(frozen=True)
class ProcessMemory:
    """One process of a service."""

    service: str
    role: str  # `HOST`: the service's own process
    num_bytes: int  # resident

    @property
    def name(self) -> str:
        return f"{self.service} {self.role}"


def memory_of(system: System) -> dict[int, ProcessMemory]:
    """Return the processes of all services, by pid."""
    found = {}
    for service, running in system.services().items():
        try:
            host = psutil.Process(running["pid"])
            for process in (host, *host.children(recursive=True)):
                role = HOST if process.pid == host.pid else _role_of(process)
                found[process.pid] = ProcessMemory(service, role, process.memory_info().rss)
        except (psutil.Error, TypeError):
            continue
    return found


def _role_of(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    return next((role for part, role in ROLES.items() if part in command), process.name())


def loops_of(system: System, probed: Path) -> dict[str, LoopStops]:
    """Return the stops of the loops, by service and loop."""
    processes = memory_of(system)
    return {
        f"{processes[each.pid].service} {each.loop}": each
        for each in read_stops(probed)
        if each.pid in processes and processes[each.pid].service.startswith(LOOPS_OF)
    }


@dataclass
class Growth:
    """Memory of processes against what they had before."""

    before: Mapping[int, ProcessMemory]
    pids: Mapping[str, int]  # of services
    peak: dict[int, ProcessMemory] = field(default_factory=dict)

    @classmethod
    def of(cls, system: System) -> "Growth":
        return cls(memory_of(system), {name: each["pid"] for name, each in system.services().items()})

    def look(self, system: System) -> None:
        """Note the memory of the processes."""
        for pid, each in memory_of(system).items():
            known = self.peak.get(pid)
            if known is None or each.num_bytes > known.num_bytes:
                self.peak[pid] = each

    def figures(self) -> dict[str, dict[str, int]]:
        """Return the largest process of each service and role: MiB before, and at the peak."""
        found: dict[str, dict[str, int]] = {}
        for pid, each in self.peak.items():
            before = self.before[pid].num_bytes if pid in self.before else 0
            known = found.setdefault(each.name, {"before_mib": 0, "peak_mib": 0})
            known["before_mib"] = max(known["before_mib"], before >> 20)
            known["peak_mib"] = max(known["peak_mib"], each.num_bytes >> 20)
        return found

    def faults(self, system: System) -> list[str]:
        """Return which processes have ended, or have kept memory."""
        after = memory_of(system)
        found = [
            f"{name} has another process than before"
            for name, each in system.services().items()
            if each["pid"] != self.pids[name]
        ]
        for pid, each in self.before.items():
            if pid not in after:
                found.append(f"process {pid} of {each.service} has ended")
            elif (left := (after[pid].num_bytes - each.num_bytes) >> 20) > MAX_LEFT_MIB:
                found.append(f"a process of {each.service} has kept {left} MiB")
        return found
