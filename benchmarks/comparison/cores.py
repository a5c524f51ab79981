"""Assignment of cores to services, and pinning of their processes."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class CorePlan:
    """Cores of all arms. Encoders take turns on the first half; prefill_decode has the other."""

    everything: tuple[int, ...]  # the monolith, and what is small: proxy, gateway, Redis, store, the load
    encoder: tuple[int, ...]
    prefill_decode: tuple[int, ...]

    def encoders(self, count: int) -> list[tuple[int, ...]]:
        """Cores of each of `count` encoders: the encoders' half for one, else equal parts of all."""
        if count == 1:
            return [self.encoder]
        cores = self.everything
        return [tuple(cores[number % len(cores) :: count]) or cores[:1] for number in range(count)]

    def __str__(self) -> str:
        return (
            f"encoder on {_listed(self.encoder)}, prefill_decode on {_listed(self.prefill_decode)}, "
            f"monolith on {_listed(self.everything)}"
        )


def _listed(cores: Sequence[int]) -> str:
    return f"core{'s' if len(cores) > 1 else ''} {', '.join(map(str, cores))}"


def plan_cores(cores: Sequence[int] | None = None) -> CorePlan:
    """Halves of `cores`; by default of those that this process may use."""
    everything = tuple(sorted(os.sched_getaffinity(0) if cores is None else cores))
    half = max(1, len(everything) // 2)
    return CorePlan(everything, everything[:half], everything[half:] or everything)


def hold_to(pid: int, cores: Sequence[int]) -> None:
    """Pin every thread of a process and of its children to `cores`; ended ones are skipped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(FileNotFoundError):
                for task in Path(f"/proc/{each.pid}/task").iterdir():
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(int(task.name), cores)
