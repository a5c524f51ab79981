"""Figures of several hosts compared with their bars."""

from dataclasses import dataclass
from typing import Any

from load.intervals import Interval, median_interval, ratio_interval

from hosts_bench.handovers import ITEM_BYTES, HandoverFigures

MIB = 1 << 20


@dataclass(frozen=True)
class Bar:
    """Bar that `figure` is at least, or at most, `bound`."""

    name: str
    figure: Interval
    bound: float
    at_least: bool

    @property
    def is_held(self) -> bool:
        return self.figure.middle >= self.bound if self.at_least else self.figure.middle <= self.bound

    def __str__(self) -> str:
        sign, verdict = (">=" if self.at_least else "<="), ("held" if self.is_held else "MISSED")
        return f"{self.name:<58} {self.figure!s:<24} {sign} {self.bound:<5} {verdict}"


def throughput_bars(rates: dict[str, list[float]]) -> list[Bar]:
    bases = [way for way in ("socket", "iperf3") if way in rates]
    return [
        Bar(f"agent ÷ {way}, entries of 16 MiB", ratio_interval(rates["agent"], rates[way]), 0.8, True)
        for way in bases
    ]


def handover_bars(figures: HandoverFigures, rate_bits: int) -> list[Bar]:
    transfer_s = ITEM_BYTES * 8 / rate_bits + figures.round_trip_s
    ttft = figures.ttft_s
    added = {
        workload: [
            (far - near) / transfer_s
            for far, near in zip(ttft["remote", workload], ttft["local", workload], strict=True)
        ]
        for workload in ("one", "four")
    }
    small = ratio_interval(ttft["alone", "small"], ttft["local", "small"])
    burst = ratio_interval(figures.burst_s["alone"], figures.burst_s["local"])
    return [
        Bar("one image: added ÷ (bytes ÷ bandwidth + round trip)", median_interval(added["one"]), 1.2, False),
        Bar("four images: added ÷ the same of one image", median_interval(added["four"]), 1.2, False),
        Bar("one host: latency without ÷ with an idle agent", small, 0.98, True),
        Bar("one host: seconds for 16 at once without ÷ with", burst, 0.98, True),
    ]


def throughput_lines(rates: dict[str, list[float]]) -> list[str]:
    return [f"{way:<10} {_shown(each, 1 / MIB)} MiB/s" for way, each in rates.items()]


def handover_lines(figures: HandoverFigures) -> list[str]:
    lines = [
        f"{arm:<8} {workload:<6} {_shown(each, 1000)} ms" for (arm, workload), each in figures.ttft_s.items()
    ]
    lines += [f"{arm:<8} burst  {_shown(each, 1000)} ms" for arm, each in figures.burst_s.items()]
    return [*sorted(lines), f"round trip between the hosts {figures.round_trip_s * 1000:.2f} ms"]


def _shown(values: list[float], scale: float) -> str:
    found = median_interval([value * scale for value in values])
    return f"{found.middle:8.1f} ({found.low:.1f} to {found.high:.1f})"


def bar_as_json(bar: Bar) -> dict[str, Any]:
    figure = bar.figure
    return {
        "name": bar.name, "middle": figure.middle, "low": figure.low, "high": figure.high,
        "bound": bar.bound, "at_least": bar.at_least, "is_held": bar.is_held,
    }  # fmt: skip
