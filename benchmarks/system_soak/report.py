"""The soak itself, and its report."""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from system_soak.fault_injector import MIN_FAULTS, FaultInjector
from system_soak.target import Target
from tests.support.fast.client import Answer
from tests.support.fast.load import RIGHT, Load

GOAL_SUCCESS = 0.99
MAX_FAULTS_TOLD = 50
MAX_REFUSED_TOLD = 50


async def wear_out(
    target: Target, load: Load, minutes: float, seed: int, num_faults: int = MIN_FAULTS
) -> dict[str, Any]:
    """The report; its `faults` list what was wrong."""
    injector = FaultInjector(target, load.tally.deaths, seed + 1)  # not in step with the load
    memory = {"start": target.memory_bytes()}
    done = asyncio.Event()
    started = time.monotonic()
    wrong: list[str] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run_until(done))
        try:
            await injector.run(minutes * 60, num_faults)
        except RuntimeError as error:
            wrong.append(str(error))
        finally:
            done.set()
    elapsed_s = time.monotonic() - started
    leftovers = await asyncio.to_thread(_leftovers, target, wrong)
    memory["end"] = target.memory_bytes()
    tally = load.tally
    waited = {kind: tally.without_token_at_death_of(kind) for kind in target.answering_kinds}
    all_waited = sum(waited.values(), Counter())
    wrong += tally.faults[:MAX_FAULTS_TOLD]
    if all_waited[RIGHT] < GOAL_SUCCESS * all_waited.total():
        wrong.append(f"an instance died, and of the requests without a token became: {waited}")
    if not tally.outcomes[RIGHT]:
        wrong.append("nothing was answered")
    return {
        "engine": target.engine,
        "seed": seed,
        "elapsed_s": elapsed_s,
        "num_callers": load.num_callers,
        "num_requests": sum(tally.outcomes.values()),
        "outcomes": dict(tally.outcomes.most_common()),
        "refused": [_told(answer, injector.history) for answer in tally.refused[:MAX_REFUSED_TOLD]],
        "latency": tally.latencies(),
        "num_faults": sum(injector.counts.values()),
        "faults_injected": dict(injector.counts.most_common()),
        "longest_recovery_s": injector.longest_recovery_s,
        "ready_again_s": {what: _summary(each) for what, each in sorted(target.recoveries_s().items())},
        "without_token_at_death_of": {kind: dict(outcomes) for kind, outcomes in waited.items()},
        "num_encodes": target.num_encodes(),
        "shares": target.shares(),
        "restarts": target.num_restarts(),
        "left_over": leftovers,
        "memory_bytes": memory,
        "faults": wrong,
    }


def _summary(seconds: list[float]) -> dict[str, float]:
    return {"number": len(seconds), "median_s": statistics.median(seconds), "max_s": max(seconds)}


def _told(answer: Answer, history: Sequence[tuple[float, str]]) -> str:
    """A documented error, and the fault before its end."""
    end = answer.asked_at + answer.elapsed_s
    at, what = max((each for each in history if each[0] < end), default=(end, "no fault"))
    return (
        f"{answer}: {answer.message!r}, {len(answer.question.images)} images, {end - at:.2f} s after {what}"
    )


def _leftovers(target: Target, wrong: list[str]) -> dict[str, int]:
    try:
        target.wait_until_idle()
    except RuntimeError as error:
        wrong.append(str(error))
    return target.leftovers()


def print_report(report: dict[str, Any]) -> None:
    """Print the report as readable text."""
    for key in ("engine", "num_requests", "outcomes", "latency", "num_faults", "faults_injected"):
        print(f"{key:<22} {report[key]}")
    for kind, outcomes in report["without_token_at_death_of"].items():
        print(f"{'without a token when':<22} one of kind {kind} died: {outcomes}")
    for kind, share in report["shares"].items():
        print(f"{kind:<22} {share}")
    print(f"{'longest recovery':<22} {report['longest_recovery_s']:.1f} s")
    for what, taken in report["ready_again_s"].items():
        times = f"{taken['number']} times, median {taken['median_s']:.1f} s, at most {taken['max_s']:.1f} s"
        print(f"{'ready after kill of':<22} {what}: {times}")
    print(f"{'left over':<22} {report['left_over'] or 'nothing'}")
    for when, memory in report["memory_bytes"].items():
        megabytes = {name: round(number / (1 << 20), 1) for name, number in memory.items()}
        print(f"{'MiB at the ' + when:<22} {megabytes}")
    for refused in report["refused"]:
        print(f"{'refused':<22} {refused}")
    for fault in report["faults"]:
        print(f"FAULT {fault}")
