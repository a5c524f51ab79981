"""The figures as tables, and the bars."""

from dataclasses import dataclass

from gateway_bench.arms import DIRECT, GATEWAY, PROXY
from gateway_bench.redis_counts import RedisCounts
from gateway_bench.rounds import ONE, PACED, SATURATED, Figures

MAX_ADDED_MS = 1.0
MAX_ADDED_RATIO = 2.0
MIN_RATE_RATIO = 0.5


@dataclass(frozen=True)
class Bar:
    """One bar of `gateway_cost`, and what was measured."""

    text: str
    measured: float
    limit: float
    is_met: bool


def bars_of(figures: list[Figures], arm: str = GATEWAY) -> list[Bar]:
    """Every bar for `arm`, in both ways of answering."""
    by_key = {(each.workload, each.stream, each.arm): each for each in figures}
    bars: list[Bar] = []
    for stream in (True, False):
        kind = "streamed, first byte" if stream else "whole answer"
        for workload in (ONE, PACED):
            ours, proxy = (_added(by_key[workload, stream, name]) for name in (arm, PROXY))
            bars.append(_at_most(f"added latency p50 ms: {workload}, {kind}", ours, MAX_ADDED_MS))
            bars.append(
                _at_most(f"  likewise / the proxy's: {workload}, {kind}", ours / proxy, MAX_ADDED_RATIO)
            )
        ours_at, proxy_at = (by_key[SATURATED, stream, name] for name in (arm, PROXY))
        rate = ours_at.requests_per_s / proxy_at.requests_per_s
        bars.append(
            Bar(f"requests/s on one core / the proxy's: {kind}", rate, MIN_RATE_RATIO, rate >= MIN_RATE_RATIO)
        )
        cpu = proxy_at.cpu_ms_per_request / ours_at.cpu_ms_per_request
        bars.append(Bar(f"  by CPU seconds: {kind}", cpu, MIN_RATE_RATIO, cpu >= MIN_RATE_RATIO))
    return bars


def _added(figures: Figures) -> float:
    return figures.added_first_p50_ms if figures.stream else figures.added_last_p50_ms


def _at_most(text: str, measured: float, limit: float) -> Bar:
    return Bar(text, measured, limit, measured <= limit)


def print_figures(figures: list[Figures]) -> None:
    print(
        f"{'workload':24}{'answer':10}{'arm':16}{'first p50':>11}{'added':>8}{'p99 added':>11}"
        f"{'end p50':>10}{'added':>8}{'p99 added':>11}{'req/s':>9}{'CPU ms/req':>12}"
    )
    for each in figures:
        is_direct = each.arm == DIRECT
        print(
            f"{each.workload:24}{'streamed' if each.stream else 'whole':10}{each.arm:16}"
            f"{each.first_p50_ms:11.2f}{each.added_first_p50_ms:8.2f}{each.added_first_p99_ms:11.2f}"
            f"{each.last_p50_ms:10.2f}{each.added_last_p50_ms:8.2f}{each.added_last_p99_ms:11.2f}"
            f"{each.requests_per_s:9.0f}{'' if is_direct else f'{each.cpu_ms_per_request:.3f}':>12}"
        )


def print_bars(bars: list[Bar]) -> None:
    for bar in bars:
        print(
            f"{'met   ' if bar.is_met else 'MISSED'} {bar.text:70} {bar.measured:8.2f}  (bar {bar.limit:g})"
        )


def redis_bar(counts: list[RedisCounts]) -> Bar:
    num = sum(each.round_trips for each in counts if each.kind == "text")
    return _at_most("round trips to Redis for a text request", num, 0.0)


def print_counts(counts: list[RedisCounts]) -> None:
    print(f"{'request':16}{'round trips':>13}  commands to Redis for each request")
    for each in counts:
        commands = ", ".join(f"{num:g} {name}" for name, num in each.commands.items()) or "none"
        print(f"{each.kind:16}{each.round_trips:13.2f}  {commands}")
