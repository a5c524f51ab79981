"""Schedule of the arms, and the figures of all rounds."""

import asyncio
import statistics
from dataclasses import dataclass

from gateway_bench.arms import DIRECT, Arm
from gateway_bench.load import Times, Workload, ask_each_in_turn, ask_for

ONE, PACED, SATURATED = "1 client", "32 clients, paced", "32 clients, saturated"
NUM_EVENTS = 16
MIN_LIMIT_S = 60.0


def workloads() -> list[Workload]:
    """Each workload, streamed and whole.

    Paced: the model takes 50 ms to its first token, 10 ms for each further one. Saturated: it takes no time.
    """
    return [
        each
        for stream in (True, False)
        for each in (
            Workload(ONE, stream, 1, NUM_EVENTS, 0, 1),
            Workload(PACED, stream, 32, NUM_EVENTS, 50, 10),
            Workload(SATURATED, stream, 32, NUM_EVENTS, 0, 0),
        )
    ]


@dataclass(frozen=True)
class Figures:
    """Milliseconds of one workload by one arm; `added` is beyond the direct call's same quantile."""

    arm: str
    workload: str
    stream: bool
    num_answers: int
    first_p50_ms: float
    first_p99_ms: float
    last_p50_ms: float
    last_p99_ms: float
    added_first_p50_ms: float
    added_first_p99_ms: float
    added_last_p50_ms: float
    added_last_p99_ms: float
    requests_per_s: float  # median of the rounds
    cpu_ms_per_request: float  # median of the rounds; 0: not measured


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def run_rounds(arms: list[Arm], num_rounds: int, seconds: float) -> list[Figures]:
    """Run all workloads, arm after arm in each round, so that a slow phase of the machine hits all."""
    plans = workloads()
    times = {(plan.name, plan.stream, arm.name): Times() for plan in plans for arm in arms}
    urls = {arm.name: arm.url for arm in arms}
    for plan in plans:  # connections, code paths, sizes of buffers
        for arm in arms:
            await ask_for(arm.url, plan, 0.3, Times())
    for number in range(num_rounds):
        turn = arms[number % len(arms) :] + arms[: number % len(arms)]
        for plan in plans:
            if plan.num_clients == 1:
                num = max(10, int(seconds * 25))
                async with asyncio.timeout(MIN_LIMIT_S + 10 * seconds):
                    for name, each in (await ask_each_in_turn(urls, plan, num)).items():
                        kept = times[plan.name, plan.stream, name]
                        kept.first_ms += each.first_ms
                        kept.last_ms += each.last_ms
                continue
            for arm in turn:
                kept = times[plan.name, plan.stream, arm.name]
                before = arm.cpu_s()
                num_answers = await ask_for(arm.url, plan, seconds, kept)
                kept.cpu_ms.append((arm.cpu_s() - before) * 1e3 / max(num_answers, 1))
    return [
        _figures(
            plan, arm.name, times[plan.name, plan.stream, arm.name], times[plan.name, plan.stream, DIRECT]
        )
        for plan in plans
        for arm in arms
    ]


def _figures(plan: Workload, arm: str, times: Times, direct: Times) -> Figures:
    first = [quantile(times.first_ms, share) for share in (0.5, 0.99)]
    last = [quantile(times.last_ms, share) for share in (0.5, 0.99)]
    return Figures(
        arm=arm,
        workload=plan.name,
        stream=plan.stream,
        num_answers=len(times.last_ms),
        first_p50_ms=first[0],
        first_p99_ms=first[1],
        last_p50_ms=last[0],
        last_p99_ms=last[1],
        added_first_p50_ms=first[0] - quantile(direct.first_ms, 0.5),
        added_first_p99_ms=first[1] - quantile(direct.first_ms, 0.99),
        added_last_p50_ms=last[0] - quantile(direct.last_ms, 0.5),
        added_last_p99_ms=last[1] - quantile(direct.last_ms, 0.99),
        requests_per_s=statistics.median(times.requests_per_s) if times.requests_per_s else 0.0,
        cpu_ms_per_request=statistics.median(times.cpu_ms) if times.cpu_ms else 0.0,
    )
