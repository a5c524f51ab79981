"""Figures of a group of answers. Pure."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from load.client import Answer


@dataclass(frozen=True)
class Objectives:
    """Limits that a good request keeps: time to the first token, and the longest stall after it."""

    ttft_ms: float
    stall_ms: float

    def kept_by(self, answer: Answer) -> bool:
        if answer.error or not answer.times:
            return False
        return answer.ttft_ms <= self.ttft_ms and max(answer.gaps_ms, default=0.0) <= self.stall_ms


def percentile(values: Sequence[float], share: float) -> float:
    """Smallest value that at least `share` of all do not exceed; NaN for none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median(values: Iterable[float]) -> float:
    """Median without NaNs; NaN for none."""
    found = [value for value in values if not math.isnan(value)]
    return statistics.median(found) if found else float("nan")


@dataclass(frozen=True)
class Window:
    """Start of the load (monotonic) and its length in seconds."""

    start: float
    seconds: float


def figures(answers: Sequence[Answer], window: Window, objectives: Objectives) -> dict[str, float]:
    """Figures by name: `<kind>.<figure>` for each kind of request, `all.<figure>` for all together.

    Answers that are not timed count nowhere; failed ones count as failed, and lower the rates.
    """
    timed = [answer for answer in answers if answer.is_timed]
    found = _of_group("all", timed, window, objectives)
    for kind in sorted({answer.kind for answer in timed}):
        found |= _of_group(kind, [answer for answer in timed if answer.kind == kind], window, objectives)
    return found


def tokens_per_s(answers: Sequence[Answer], window: Window) -> float:
    """Tokens per second that came during the load."""
    until = window.start + window.seconds
    came = 0.0
    for answer in answers:
        if answer.times:
            in_time = sum(at <= until for at in answer.times)
            came += len(answer.token_ids) * in_time / len(answer.times)
    return came / window.seconds


def requests_per_s(answers: Sequence[Answer], window: Window) -> float:
    """Answers per second during the load, from the first of them to the last.

    That avoids rounding to what happens to end within a few seconds.
    """
    until = window.start + window.seconds
    ends = sorted(answer.end for answer in answers if answer.end <= until)
    if len(ends) < 2 or ends[-1] == ends[0]:
        return len(ends) / window.seconds
    return (len(ends) - 1) / (ends[-1] - ends[0])


def _of_group(
    name: str, answers: Sequence[Answer], window: Window, objectives: Objectives
) -> dict[str, float]:
    good = [answer for answer in answers if not answer.error]
    gaps = [gap for answer in good for gap in answer.gaps_ms]
    ttfts = [answer.ttft_ms for answer in good]
    rate = requests_per_s(good, window)
    share_kept = sum(objectives.kept_by(answer) for answer in good) / len(good) if good else 0.0
    found = {
        "ttft_ms": median(ttfts),
        "ttft_p99_ms": percentile(ttfts, 0.99),
        "tpot_ms": median(answer.tpot_ms for answer in good),
        "itl_p50_ms": percentile(gaps, 0.5),
        "itl_p99_ms": percentile(gaps, 0.99),
        "itl_p999_ms": percentile(gaps, 0.999),
        "stall_ms": max(gaps, default=float("nan")),
        "e2e_ms": median(answer.e2e_ms for answer in good),
        "tokens_per_s": tokens_per_s(good, window),
        "requests_per_s": rate,
        "goodput_per_s": rate * share_kept,
        "num_requests": float(len(answers)),
        "num_failed": float(len(answers) - len(good)),
    }
    encode = median(answer.encode_ms for answer in good if answer.encode_ms is not None)
    if not math.isnan(encode):
        found["encode_ms"] = encode
    return {f"{name}.{figure}": value for figure, value in found.items()}
