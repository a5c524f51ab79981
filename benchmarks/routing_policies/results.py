"""Figures of each arm, and the bars, which were written down before any run."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from load.client import Answer
from load.intervals import Interval, median_interval, ratio_interval

from routing_policies.arms import AFFINITY, ONE, ROUND_ROBIN
from routing_policies.conversations import LATER
from routing_policies.measuring import ArmResult

MIN_HIT_RATE, MAX_TTFT = 0.9, 0.7


@dataclass(frozen=True)
class Bar:
    name: str
    ratio: Interval
    is_held: bool


def ttfts(result: ArmResult, kind: str | None = None) -> list[float]:
    """Milliseconds to the first token, mean of each round's requests, optionally of one `kind`."""
    return [mean(_of_kind(answers, kind)) for answers in result.answers]


def hit_rates(result: ArmResult) -> list[float]:
    return [counts.hit_rate for counts in result.counts]


def bars(results: Mapping[str, ArmResult]) -> list[Bar]:
    """Bars for the arms that were run."""
    found = []
    if {AFFINITY, ONE} <= results.keys():
        ratio = ratio_interval(hit_rates(results[AFFINITY]), hit_rates(results[ONE]))
        found.append(Bar(f"hit rate >= {MIN_HIT_RATE} x {ONE}'s", ratio, ratio.middle >= MIN_HIT_RATE))
    if {AFFINITY, ROUND_ROBIN} <= results.keys():
        ratio = ratio_interval(ttfts(results[AFFINITY]), ttfts(results[ROUND_ROBIN]))
        found.append(Bar(f"TTFT <= {MAX_TTFT} x {ROUND_ROBIN}'s", ratio, ratio.middle <= MAX_TTFT))
    return found


def table(results: Mapping[str, ArmResult]) -> str:
    """Table of medians over the rounds, with 95 % intervals."""
    lines = ["| arm | prefix hit rate | TTFT, ms | TTFT of later turns, ms |", "|---|---|---|---|"]
    for arm, result in results.items():
        cells = [median_interval(hit_rates(result)), median_interval(ttfts(result))]
        cells.append(median_interval(ttfts(result, LATER)))
        lines.append(f"| `{arm}` | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def as_json(results: Mapping[str, ArmResult]) -> dict[str, Any]:
    return {
        arm: {
            "hit_rates": hit_rates(result),
            "ttft_ms": ttfts(result),
            "ttft_later_ms": ttfts(result, LATER),
        }
        for arm, result in results.items()
    }


def failures(results: Mapping[str, ArmResult]) -> list[str]:
    return [
        f"{arm}: {answer.error}"
        for arm, result in results.items()
        for answers in result.answers
        for answer in answers
        if answer.error
    ]


def _of_kind(answers: list[Answer], kind: str | None) -> list[float]:
    return [each.ttft_ms for each in answers if not each.error and kind in (None, each.kind)] or [
        float("nan")
    ]
