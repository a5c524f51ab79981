"""Results of the runs, as numbers and as text."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from handover_ways.peers import Passage

FLOORS = ("memcpy", "memcpy same", "store")
"""Ways that consist of one plain copy: no copying way can be faster than the fastest of them."""


@dataclass(frozen=True)
class Spread:
    """Median, mean and 99th percentile in milliseconds."""

    p50: float
    mean: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Spread":
        ordered = sorted(seconds)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return cls(statistics.median(ordered) * 1e3, statistics.mean(ordered) * 1e3, p99 * 1e3)

    def __str__(self) -> str:
        return f"{self.p50:.2f} {self.mean:.2f} {self.p99:.2f}"


@dataclass(frozen=True)
class Result:
    """One way with one size in one regime; medians unless stated otherwise."""

    regime: str
    way: str
    size_mib: float
    num_pairs: int
    num_tensors: int
    prepare_ms: float  # before the start: the store's reservation, a file's directory
    ping_ms: float  # the store's, just before; 0 for other ways
    copy_ms: float
    after_write_ms: float  # from the end of the write to the consumer's tensor
    tensor: Spread  # from the start of the write to the consumer's tensor
    read: Spread  # ... until the consumer has read all of it
    gib_per_s: float  # of all pairs together, read included
    of_memcpy: float  # bandwidth of the copy, in that of the memcpy just before it; 0: unknown

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Ratio:
    """Time of a way ÷ time of the store: median, mean, 99th percentile.

    `best` is the same for a handover that takes no longer than its one copy, by medians.
    """

    regime: str
    way: str
    size_mib: float
    until: str  # tensor, read
    p50: float
    mean: float
    p99: float
    best: float

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def result_of(
    regime: str,
    way: str,
    mib: float,
    num_pairs: int,
    passages: Sequence[Passage],
    memcpys: Sequence[Passage] = (),
    rates: Sequence[float] = (),
) -> Result:
    """Result of passages; `memcpys` precede each, `rates` are GiB/s of each round of all pairs."""
    return Result(
        regime,
        way,
        mib,
        num_pairs,
        len(passages),
        median_ms([each.prepare_s for each in passages]),
        median_ms([each.ping_s for each in passages]),
        median_ms([each.copy_s for each in passages]),
        median_ms([each.tensor_s - each.written_s for each in passages]),
        Spread.of([each.tensor_s for each in passages]),
        Spread.of([each.read_s for each in passages]),
        statistics.median(rates) if rates else mib / 1024 / statistics.median(p.read_s for p in passages),
        of_memcpy(memcpys, passages),
    )


def of_memcpy(memcpys: Sequence[Passage], passages: Sequence[Passage]) -> float:
    """Median of each copy ÷ the memcpy just before it, so that noise hits both."""
    ratios = [a.copy_s / b.copy_s for a, b in zip(memcpys, passages, strict=False) if b.copy_s]
    return statistics.median(ratios) if ratios else 0.0


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def ratios(results: Sequence[Result], regime: str, mib: float) -> list[Ratio]:
    """Ratios of all ways to the store, for one pair."""
    of = {
        each.way: each for each in results if (each.regime, each.size_mib, each.num_pairs) == (regime, mib, 1)
    }
    store = of.get("store")
    if store is None:
        return []
    floor = min(of[way].copy_ms for way in FLOORS if way in of)
    reading = store.read.p50 - store.tensor.p50
    found = []
    for way, each in of.items():
        if way in FLOORS or way == "message":
            continue
        for until, its, ours, best in (
            ("tensor", each.tensor, store.tensor, floor),
            ("read", each.read, store.read, floor + reading),
        ):
            found.append(
                Ratio(
                    regime,
                    way,
                    mib,
                    until,
                    its.p50 / ours.p50,
                    its.mean / ours.mean,
                    its.p99 / ours.p99,
                    its.p50 / best,
                )
            )
    return found


# ---- as text -------------------------------------------------------------------------------------
def regime_table(results: Sequence[Result], regime: str, mib: float) -> list[str]:
    """Times of all ways, and ratios to the store."""
    rows = [r for r in results if (r.regime, r.size_mib, r.num_pairs) == (regime, mib, 1)]
    lines = [f"{regime}, {mib:g} MiB: milliseconds, p50 mean p99"]
    lines.append(f"{'':>14} {'tensors':>8} {'copy':>8} {'until a tensor':>24} {'until it is read':>24}")
    for each in rows:
        if each.way == "message" or each.way.startswith("memcpy"):
            tensor = read = "-"
        else:
            tensor, read = str(each.tensor), str(each.read)
        lines.append(f"{each.way:>14} {each.num_tensors:>8} {each.copy_ms:>8.2f} {tensor:>24} {read:>24}")
    lines.append(
        f"{regime}, {mib:g} MiB: in times of the store (a perfect one: its p50 no more than one copy)"
    )
    lines.append(f"{'':>14} {'until':>8} {'p50':>8} {'mean':>8} {'p99':>8} {'perfect':>8}")
    lines += [
        f"{each.way:>14} {each.until:>8}"
        + "".join(f" {x:>8.1f}" for x in (each.p50, each.mean, each.p99, each.best))
        for each in ratios(results, regime, mib)
    ]
    return lines


def store_lines(results: Sequence[Result]) -> list[str]:
    """The store's copy and the rest of its handover, by size."""
    return [
        f"{each.size_mib:g} MiB, {each.regime}: copy at {each.of_memcpy:.2f} of memcpy; from its end to the "
        f"consumer's tensor {each.after_write_ms:.3f} ms, {each.after_write_ms / each.ping_ms:.1f} pings; "
        f"reservation before {each.prepare_ms - each.ping_ms:.3f} ms"
        for each in results
        if each.way == "store" and each.num_pairs == 1
    ]
