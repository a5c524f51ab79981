"""Runs ways in turn and compares them with plain copies. Knows neither CUDA nor the store."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

MIB = 1 << 20
WARM_UPS = 2
TARGET = 0.9
"""Target of each way's rate, as a share of the plain copy's; both without what a copy of any size takes."""
FITTED_FROM_MIB = 64
"""Smallest size of the fit: smaller ones measure caches and calls."""


@dataclass(frozen=True)
class Passage:
    """Handover of one tensor, in seconds; each part ends when the GPU is done with it."""

    write_s: float  # the producer's copy
    told_s: float  # seal, and the consumer's pin
    open_s: float  # until the consumer's kernels can read it


class Way(Protocol):
    """Transport that is being measured."""

    name: str

    def hand_over(self, tensor: torch.Tensor) -> Passage:
        """Hand over a tensor; raises RuntimeError if other bytes arrived, or `cuda_ipc` took extra memory."""


PlainCopy = Callable[[torch.Tensor], float]
"""Copies a tensor and returns the seconds."""


@dataclass(frozen=True)
class Figure:
    """Medians of one way and size. Ratios are to the plain copy that moves the same bytes the same way."""

    way: str
    mib: float
    write_gb_s: float
    told_ms: float
    open_ms: float
    plain_out: str
    plain_out_gb_s: float
    out_ratio: float
    plain_in: str | None = None  # None: the consumer copies nothing
    open_gb_s: float | None = None
    plain_in_gb_s: float | None = None
    in_ratio: float | None = None


@dataclass(frozen=True)
class Compared:
    """Plain copies that a way is compared with."""

    out: str
    in_: str | None


def measure(
    ways: Sequence[Way],
    plain: Mapping[str, PlainCopy],
    compared: Mapping[str, Compared],
    make: Callable[[float], torch.Tensor],
    sizes_mib: Sequence[float],
    repeats: int,
) -> list[Figure]:
    """Run all ways and plain copies in turn, `repeats` times for each size."""
    figures: list[Figure] = []
    for mib in sizes_mib:
        passages: dict[str, list[Passage]] = {way.name: [] for way in ways}
        plain_s: dict[str, list[float]] = {name: [] for name in plain}
        for number in range(repeats + WARM_UPS):
            tensor = make(mib)
            for way in ways:
                passage = way.hand_over(tensor)
                if number >= WARM_UPS:
                    passages[way.name].append(passage)
            for name, copy in plain.items():
                seconds = copy(tensor)
                if number >= WARM_UPS:
                    plain_s[name].append(seconds)
        rates = {name: gb_s(mib, statistics.median(each)) for name, each in plain_s.items()}
        figures += [figure(name, mib, each, compared[name], rates) for name, each in passages.items()]
    return figures


def figure(
    way: str, mib: float, passages: Sequence[Passage], compared: Compared, rates: Mapping[str, float]
) -> Figure:
    write = gb_s(mib, statistics.median(each.write_s for each in passages))
    open_s = statistics.median(each.open_s for each in passages)
    values: dict[str, Any] = {
        "way": way,
        "mib": mib,
        "write_gb_s": write,
        "told_ms": 1e3 * statistics.median(each.told_s for each in passages),
        "open_ms": 1e3 * open_s,
        "plain_out": compared.out,
        "plain_out_gb_s": rates[compared.out],
        "out_ratio": write / rates[compared.out],
    }
    if compared.in_ is not None:
        rate = gb_s(mib, open_s)
        values |= {
            "plain_in": compared.in_,
            "open_gb_s": rate,
            "plain_in_gb_s": rates[compared.in_],
            "in_ratio": rate / rates[compared.in_],
        }
    return Figure(**values)


def gb_s(mib: float, seconds: float) -> float:
    """Rate in 10^9 bytes per second."""
    return mib * MIB / seconds / 1e9


@dataclass(frozen=True)
class Fit:
    """Seconds of one direction of a way as a + b x bytes, beside the same fit of the plain copy."""

    way: str
    direction: str  # "write" or "open"
    fixed_us: float  # a: Python, events, calls
    gb_s: float  # 1 / b
    plain_fixed_us: float
    plain_gb_s: float

    @property
    def ratio(self) -> float:
        return self.gb_s / self.plain_gb_s

    @property
    def reaches_target(self) -> bool:
        return self.ratio >= TARGET


def fits(figures: Sequence[Figure]) -> list[Fit]:
    """Fits of all ways with two sizes from `FITTED_FROM_MIB` on; none where noise exceeds the rate."""
    found: list[Fit] = []
    large = [each for each in figures if each.mib >= FITTED_FROM_MIB]
    for way in dict.fromkeys(each.way for each in large):
        mine = [each for each in large if each.way == way]
        rates = {
            "write": [(each.mib, each.write_gb_s, each.plain_out_gb_s) for each in mine],
            "open": [
                (each.mib, each.open_gb_s, each.plain_in_gb_s)
                for each in mine
                if each.open_gb_s is not None and each.plain_in_gb_s is not None
            ],
        }
        for direction, points in rates.items():
            way_fit = _line([(mib, rate) for mib, rate, _ in points])
            plain_fit = _line([(mib, rate) for mib, _, rate in points])
            if way_fit is not None and plain_fit is not None:
                found.append(Fit(way, direction, *way_fit, *plain_fit))
    return found


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Fixed microseconds and the rate in GB/s of (MiB, GB/s); None without a rising line."""
    if len({mib for mib, _ in points}) < 2:
        return None
    num_bytes = [mib * MIB for mib, _ in points]
    seconds = [size / (rate * 1e9) for size, (_, rate) in zip(num_bytes, points, strict=True)]
    slope, fixed_s = statistics.linear_regression(num_bytes, seconds)
    return (1e6 * fixed_s, 1e-9 / slope) if slope > 0 else None


def fit_table(fitted: Sequence[Fit]) -> str:
    """Fits as the table of docs/design/transports.md."""
    lines = [
        f"| way, from {FITTED_FROM_MIB} MiB | fixed, us | GB/s | plain: fixed, us | GB/s | ratio | target |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.way}, {each.direction} | {each.fixed_us:.0f} | {each.gb_s:.1f} | {each.plain_fixed_us:.0f} "
        f"| {each.plain_gb_s:.1f} | {each.ratio:.2f} | {'reached' if each.reaches_target else 'missed'} |"
        for each in fitted
    ]
    return "\n".join(lines)


def table(figures: Sequence[Figure]) -> str:
    """Figures as the table of docs/design/transports.md."""
    lines = [
        "| way | MiB | written, GB/s | plain, GB/s | ratio | told, ms | opened, ms | plain in | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in figures:
        into = (
            "none needed | -" if each.in_ratio is None else f"{each.plain_in_gb_s:.1f} | {each.in_ratio:.2f}"
        )
        lines.append(
            f"| {each.way} | {each.mib:g} | {each.write_gb_s:.1f} | {each.plain_out_gb_s:.1f} "
            f"| {each.out_ratio:.2f} | {each.told_ms:.2f} | {each.open_ms:.3f} | {into} |"
        )
    return "\n".join(lines)


def report(machine: Mapping[str, str], figures: Sequence[Figure]) -> dict[str, Any]:
    """Report as plain data, for a file."""
    return {
        "machine": dict(machine),
        "figures": [asdict(each) for each in figures],
        "target": TARGET,
        "fits": [
            {**asdict(each), "ratio": each.ratio, "reaches_target": each.reaches_target}
            for each in fits(figures)
        ],
    }
