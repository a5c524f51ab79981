"""Processes of a running system: their memory, those that have ended, and the stops of their event loops."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.hostile.loop_probe import LoopStops, read_stops
from tests.support.real.system import System

MAX_LEFT_MIB = 256  # that a process may keep
LOOPS_OF = ("gateway", "prefill_decode")  # services whose event loop all callers share


@dataclass(frozen=True)
class ProcessMemory:
    """One process of a service."""

    service: str
    num_bytes: int  # resident
    is_host: bool  # the service's own process


def memory_of(system: System) -> dict[int, ProcessMemory]:
    """Return the processes of all services, by pid."""
    found = {}
    for name, service in system.services().items():
        try:
            host = psutil.Process(service["pid"])
            for process in (host, *host.children(recursive=True)):
                found[process.pid] = ProcessMemory(name, process.memory_info().rss, process.pid == host.pid)
        except (psutil.Error, TypeError):
            continue
    return found


def loops_of(system: System, probed: Path) -> dict[str, LoopStops]:
    """Return the stops of the event loops, by service."""
    stops = read_stops(probed)
    return {
        name: stops[service["pid"]]
        for name, service in system.services().items()
        if name.startswith(LOOPS_OF) and service["pid"] in stops
    }


@dataclass
class Growth:
    """Memory of processes against what they had before."""

    before: Mapping[int, ProcessMemory]
    pids: Mapping[str, int]  # of services
    peak: dict[int, int] = field(default_factory=dict)  # bytes

    @classmethod
    def of(cls, system: System) -> "Growth":
        return cls(memory_of(system), {name: each["pid"] for name, each in system.services().items()})

    def look(self, system: System) -> None:
        """Note the memory of the processes."""
        for pid, each in memory_of(system).items():
            if pid in self.before:
                self.peak[pid] = max(self.peak.get(pid, 0), each.num_bytes)

    def grown_mib(self, pid: int) -> float:
        """Return the peak of a process, beyond what it had before."""
        return (self.peak.get(pid, 0) - self.before[pid].num_bytes) / 2**20

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
