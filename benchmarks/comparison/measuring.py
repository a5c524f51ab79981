"""Measures all arms in turn, repeat after repeat, workload after workload."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from load.client import Answer, Endpoint, new_session
from load.contents import TextMaker
from load.figures import Objectives, Window, figures, median
from load.intervals import Interval, ratio_interval

from comparison.model_shapes import Scale
from comparison.processes import cpu_seconds
from comparison.rounds import run_round
from comparison.systems import RunningSystem
from comparison.workloads import Workload, make_round

QUIET_LOOK_S = 0.05
QUIET_SHARE = 0.1  # of one core, by all arms but the one whose turn it is
QUIET_LIMIT_S = 3.0


@dataclass(frozen=True)
class Plan:
    scale: Scale
    workloads: Sequence[Workload]
    repeats: int
    seed: int
    objectives: Objectives
    texts: TextMaker
    load_seconds: float = 10.0  # of each round of a load
    num_warm_up: int = 1  # repeats before the first one, whose figures do not count
    first_repeat: int = 0  # of this start of the systems; each repeat has its own contents


@dataclass
class Measured:
    """Figures of each repeat, in order, by workload and arm."""

    figures: dict[str, dict[str, list[dict[str, float]]]] = field(default_factory=dict)
    tokens: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # by arm, then by label
    failures: list[str] = field(default_factory=list)
    num_starts: int = 1  # of the systems, with equally many repeats each, one start after the other

    def of(self, workload: str, arm: str, figure: str) -> list[float]:
        """One value per repeat; NaN where a repeat has none."""
        repeats = self.figures.get(workload, {}).get(arm, [])
        return [each.get(figure, float("nan")) for each in repeats]

    def ratio(self, workload: str, arm: str, base: str, figure: str) -> Interval:
        """`arm` ÷ `base`, by pairs of repeats."""
        return ratio_interval(
            self.of(workload, arm, figure), self.of(workload, base, figure), self.num_starts
        )


def turns(arms: Sequence[str], number: int) -> list[str]:
    """Order of arms: each is first, and each follows each, about equally often."""
    first = number % len(arms)
    order = [*arms[first:], *arms[:first]]
    return order[::-1] if (number // len(arms)) % 2 else order


async def measure(
    systems: Sequence[RunningSystem],
    plan: Plan,
    on_round: Callable[[str], None] | None = None,
    so_far: Measured | None = None,
) -> Measured:
    """Figures of all workloads on all systems, appended to `so_far`; `failures` names failed requests."""
    by_name = {system.arm.name: system for system in systems}
    measured = so_far or Measured()
    last_repeat = plan.first_repeat + plan.repeats
    async with new_session() as session:
        endpoints = {name: Endpoint(each.base_url, each.model, session) for name, each in by_name.items()}
        for repeat in [*range(-plan.num_warm_up, 0), *range(plan.first_repeat, last_repeat)]:
            for place, workload in enumerate(plan.workloads):
                for name in turns(list(by_name), max(repeat, 0) + place):
                    others = [each for each in systems if each.arm.name != name]
                    await asyncio.to_thread(wait_until_quiet, others)
                    found = await _one_round(by_name[name], endpoints[name], workload, plan, repeat, measured)
                    if repeat >= 0:
                        by_arm = measured.figures.setdefault(workload.name, {})
                        by_arm.setdefault(name, []).append(found)
            if on_round is not None:
                on_round("warmed up" if repeat < 0 else f"repeat {repeat + 1} of {last_repeat}")
    return measured


async def _one_round(
    system: RunningSystem,
    endpoint: Endpoint,
    workload: Workload,
    plan: Plan,
    repeat: int,
    measured: Measured,
) -> dict[str, float]:
    """Run one arm's turn of a workload."""
    asked = make_round(workload, plan.scale, plan.texts, plan.load_seconds, plan.seed, repeat)
    outside = [system.services[name] for name in system.outside_vllm]
    before = cpu_seconds(outside)
    answers, start, seconds = await run_round(endpoint, asked)
    spent = cpu_seconds(outside) - before
    name = system.arm.name
    measured.failures += [f"{name}, {workload.name}: {each.error}" for each in answers if each.error]
    if repeat >= 0:
        tokens = measured.tokens.setdefault(name, {})
        tokens |= {each.label: each.token_ids for each in answers if each.label and not each.error}
    found = figures(answers, Window(start, seconds), plan.objectives)
    found["all.cpu_ms_outside_vllm"] = spent * 1e3 / max(len(answers), 1)
    found["image.after_encode_ms"] = _after_encode(answers)
    return found


def _after_encode(answers: Iterable[Answer]) -> float:
    """Median ms from the last image's encode to the first token, if the system reports it."""
    timed = (answer for answer in answers if answer.is_timed and not answer.error)
    return median(answer.ttft_ms - answer.encode_ms for answer in timed if answer.encode_ms is not None)


def wait_until_quiet(systems: Iterable[RunningSystem]) -> None:
    """Wait, up to a limit, until these systems use next to no CPU, so that turns do not overlap."""
    pids = [pid for system in systems for pid in system.services.values()]
    deadline = time.monotonic() + QUIET_LIMIT_S
    while pids:
        began, before = time.monotonic(), cpu_seconds(pids)
        time.sleep(QUIET_LOOK_S)
        share = (cpu_seconds(pids) - before) / (time.monotonic() - began)
        if share <= QUIET_SHARE or time.monotonic() > deadline:
            return


def print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
