"""Resources of an arm's processes: memory of each, CPU seconds by service."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import psutil

MIB = 1 << 20


@dataclass(frozen=True)
class ProcessMemory:
    """PSS of a process, which divides shared pages among their users, so that sums are right."""

    service: str
    name: str
    rss_mib: float
    pss_mib: float

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty once it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def memory(services: Mapping[str, int]) -> list[ProcessMemory]:
    """Memory of every process; `services` has the pids of their roots by name."""
    found = []
    for service, pid in services.items():
        for process in tree(pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                info = process.memory_full_info()
                found.append(ProcessMemory(service, process.name(), info.rss / MIB, info.pss / MIB))
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system seconds of these processes and their descendants since their starts."""
    total = 0.0
    for pid in pids:
        for process in tree(pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
    return total
