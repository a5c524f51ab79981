"""Handover of a tensor between processes: the store beside the usual ways, in one run.

    python benchmarks/handover.py [--json FILE] [--plot FILE.svg] [--regimes recycled kept]
                                  [--sizes MIB ...] [--pairs N ...] [--kept-disk-gib GIB] ...

A producer process hands a bfloat16 tensor `[rows, 4096]` to a consumer process. The clock starts when the
producer starts to write and is read when the consumer has a tensor, and again when it has read every byte
of it (safetensors maps lazily: a tensor alone shows little). The reservation is made before, as encoders
do while the tensor is being computed, and shown apart. Every arrival is checked by its sum.

    memcpy       libc's memmove of the same bytes within the producer, over memory as large as the region
    memcpy same  the same to one place, which may still be in the processor's cache
    message      the message that announces a tensor to its consumer, for all ways but the store
    store        copy into the region, seal; the consumer gets a view, no copy
    shm copy     multiprocessing.shared_memory: a block for each tensor, copied in and out
    st tmpfs     a safetensors file on the tmpfs, as vLLM's ECExampleConnector saves and loads it
    st disk      the same in the working directory
    redis        SET and GET through a Unix socket; a server of its own, unless --redis-url is given

Regimes:

    recycled  Each tensor is deleted when it was read, so that the next one finds memory that was just
              used. The runs of all ways alternate. With `--pairs`, many producers and consumers at once.
    kept      Tensors stay, as in a cache: the store and Redis evict by themselves, files and shared_memory
              pile up to a bound. Each way for itself, one tensor after another, as in a service that has
              no other; a memcpy before each.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from handover_ways.kept import KeptBounds, Series, measure_kept
from handover_ways.peers import Pair, Passage, Places
from handover_ways.plots import plots
from handover_ways.results import Result, ratios, regime_table, result_of, store_lines
from handover_ways.ways import WIDTH

from tests.support.stores import StoreProcess

MIB, GIB = 1 << 20, 1 << 30
DEFAULT_SIZES_MIB = (0.0625, 0.25, 1, 4, 16, 64, 256)
WARM_UPS = 2
GOALS = {"st disk": 15, "st tmpfs": 8, "redis": 30}  # times slower than the store, at GOAL_MIB
GOAL_MIB = 16
REGIMES = ("recycled", "kept")


@dataclass(frozen=True)
class Stage:
    """Processes, ways and bounds of a run."""

    pairs: list[Pair]
    ways: list[str]
    bounds: KeptBounds
    options: argparse.Namespace


def repeats_of(mib: float, most: int) -> int:
    return max(3, min(most, int(most * 16 / max(mib, 16))))


def measure(pairs: list[Pair], ways: list[str], mib: float, repeats: int) -> list[Result]:
    """Measure all ways in turn, `repeats` times."""
    rows = max(1, int(mib * MIB) // (2 * WIDTH))
    passages: dict[str, list[Passage]] = {way: [] for way in ways}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(repeats + WARM_UPS):
        for way in ways:
            for pair in pairs:
                pair.order(way, rows, keeps=False)
            for pair in pairs:
                pair.go()
            arrived = [pair.finish() for pair in pairs]
            if number >= WARM_UPS:
                passages[way] += arrived
                begin = min(each.started_at for each in arrived)
                end = max(each.started_at + each.read_s for each in arrived)
                rates[way].append(len(pairs) * rows * WIDTH * 2 / (end - begin) / GIB)
    memcpys = passages.get("memcpy", [])
    return [result_of("recycled", way, mib, len(pairs), passages[way], memcpys, rates[way]) for way in ways]


# ---- what is needed around it --------------------------------------------------------------------
@contextlib.contextmanager
def redis_server(url: str | None, run_dir: Path, max_bytes: int) -> Iterator[str | None]:
    """Redis at `url`, or an own server limited to `max_bytes` if there is a redis-server."""
    binary = shutil.which("redis-server") or shutil.which("redis-server", path=Path(sys.executable).parent)
    if url is not None or binary is None:
        yield url
        return
    socket = run_dir / "redis.sock"
    command = [binary, "--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
    command += ["--maxmemory", str(max_bytes), "--maxmemory-policy", "allkeys-lru", "--dir", str(run_dir)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(500):
            if socket.exists():
                break
            threading.Event().wait(0.02)
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.wait(10)


def load_average() -> float:
    return float(Path("/proc/loadavg").read_text().split()[0])


def run(options: argparse.Namespace, pairs: list[Pair], bounds: KeptBounds) -> dict[str, object]:
    """Measure all regimes and print tables."""
    run_dir = Path(tempfile.mkdtemp(prefix="triptych-bench-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="triptych-bench-", dir="."))
    most_mib = max(*options.sizes, options.pairs_size * max(options.pairs, default=0))
    region_bytes = max(int(most_mib * 1.1 + 64) * MIB, bounds.region_bytes)
    settings = ["--reserve-fraction=0", "--high-watermark=1", "--log-level=INFO"]
    settings += [f"--region-dir={options.region_dir}"] if options.region_dir is not None else []
    settings += ["--large-pages"] if options.large_pages else []
    store = StoreProcess(run_dir, *settings, region_bytes=region_bytes)
    load_before = load_average()
    try:
        with redis_server(options.redis_url, run_dir, bounds.region_bytes) as redis_url:
            store.start()
            places = Places(
                str(store.socket), str(run_dir), str(disk), redis_url, region_bytes, bounds.tmpfs_bytes,
                bounds.disk_bytes,
            )  # fmt: skip
            for pair in pairs:
                pair.connect(places)
            for pair in pairs:
                pair.wait_ready()
            ways = ["message", "memcpy", "memcpy same", "store", "shm copy", "st tmpfs", "st disk"]
            ways += ["redis"] if redis_url is not None else []
            results, series = regimes(Stage(pairs, ways, bounds, options))
            for pair in pairs:
                pair.close()
            has_large_pages = "region has large pages" in store.log()
    finally:
        store.close()
        shutil.rmtree(run_dir)
        shutil.rmtree(disk)
    goals = goals_of(results)
    print(*store_lines(results), *goals, sep="\n")
    load = (load_before, load_average())
    print(f"load average {load[0]} to {load[1]}; large pages: {'yes' if has_large_pages else 'no'}")
    return {
        "results": [each.as_json() for each in results],
        "ratios": [
            each.as_json() for regime in REGIMES for mib in sizes_of(results, regime)
            for each in ratios(results, regime, mib)
        ],
        "kept": [each.as_json() for each in series],
        "goals": goals,
        "load_average": load,
        "large_pages": has_large_pages,
    }  # fmt: skip


def regimes(stage: Stage) -> tuple[list[Result], list[Series]]:
    options, results, series = stage.options, list[Result](), list[Series]()
    if "recycled" in options.regimes:
        results += one_pair(stage)
        results += many_pairs(stage)
    if "kept" in options.regimes:
        kept, series = measure_kept(stage.pairs[0], stage.ways, stage.bounds, options.kept_size)
        results += kept
    for regime in REGIMES:
        for mib in sizes_of(results, regime):
            if mib in (GOAL_MIB, options.kept_size):
                print(*regime_table(results, regime, mib), sep="\n")
    print(*(each.summary() for each in series if each.way == "st disk"), sep="\n")
    return results, series


def sizes_of(results: list[Result], regime: str) -> list[float]:
    return sorted({each.size_mib for each in results if each.regime == regime and each.num_pairs == 1})


def one_pair(stage: Stage) -> list[Result]:
    results: list[Result] = []
    print("milliseconds from the start of the write until every byte is read (until there is a tensor)")
    print(f"{'MiB':>8} " + "".join(f"{way:>20}" for way in stage.ways))
    for mib in stage.options.sizes:
        measured = measure(stage.pairs[:1], stage.ways, mib, repeats_of(mib, stage.options.repeats))
        results += measured
        cells = [
            f"{each.copy_ms:.3f}"
            if each.way.startswith("memcpy")
            else f"{each.read.p50:.3f} ({each.tensor.p50:.3f})"
            for each in measured
        ]
        print(f"{mib:>8g} " + "".join(f"{cell:>20}" for cell in cells), flush=True)
    return results


def many_pairs(stage: Stage) -> list[Result]:
    options, results = stage.options, list[Result]()
    ways = [way for way in stage.ways if way != "message" and not way.startswith("memcpy")]
    print(f"GiB/s of all pairs together, {options.pairs_size:g} MiB tensors, reading included")
    print(f"{'pairs':>8} " + "".join(f"{way:>20}" for way in ways))
    for number in options.pairs:
        measured = measure(stage.pairs[:number], ways, options.pairs_size, max(3, options.repeats // 3))
        results += measured if number > 1 else []
        print(f"{number:>8} " + "".join(f"{each.gib_per_s:>20.2f}" for each in measured), flush=True)
    return results


def goals_of(results: list[Result]) -> list[str]:
    """Goals and their results, as text."""
    return [
        f"{each.way}, {each.regime}, {GOAL_MIB} MiB: {each.p50:.1f} times the store's time until the "
        f"{'tensor is there' if each.until == 'tensor' else 'tensor is read'} (goal: {GOALS[each.way]}; "
        f"a perfect handover: {each.best:.1f})"
        for regime in REGIMES
        for each in ratios(results, regime, GOAL_MIB)
        if each.way in GOALS
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--plot", type=Path, help="draw them here, as SVG")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=REGIMES)
    parser.add_argument("--sizes", type=float, nargs="+", default=DEFAULT_SIZES_MIB, metavar="MIB")
    parser.add_argument("--pairs", type=int, nargs="*", default=(1, 2, 4, 8), help="producers and consumers")
    parser.add_argument("--pairs-size", type=float, default=16, metavar="MIB", help="their tensors")
    parser.add_argument("--repeats", type=int, default=15, help="fewer for tensors above 16 MiB")
    parser.add_argument("--kept-size", type=float, default=16, metavar="MIB", help="tensors that are kept")
    parser.add_argument(
        "--kept-region-gib", type=float, default=1, metavar="GIB", help="also Redis' maxmemory"
    )
    parser.add_argument("--kept-tmpfs-gib", type=float, default=2, metavar="GIB", help="of files, and of shm")
    parser.add_argument(
        "--kept-disk-gib", type=float, metavar="GIB",
        help="of files; default: enough for the kernel to slow down writers, at most 6",
    )  # fmt: skip
    parser.add_argument("--redis-url", help="compare with the tensor through this Redis")
    parser.add_argument("--region-dir", type=Path, help="a tmpfs for the region, e.g. one with huge=advise")
    parser.add_argument("--large-pages", action="store_true", help="the store asks for large pages")
    options = parser.parse_args()
    bounds = KeptBounds.of(options.kept_region_gib, options.kept_tmpfs_gib, options.kept_disk_gib)
    refusal = bounds.refusal() if "kept" in options.regimes else None
    if refusal is not None:
        print(refusal, file=sys.stderr)
        return 2
    resource_tracker.ensure_running()  # one for all: they share the names of shared memory
    pairs = [Pair(number) for number in range(max(*options.pairs, 1) if options.pairs else 1)]
    try:
        report = run(options, pairs, bounds)
    finally:
        for pair in pairs:
            pair.close()
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))
    if options.plot is not None:
        options.plot.write_text(plots(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
