"""From one process's tensor to another's: the store beside the usual ways, in one run.

    python benchmarks/handover.py [--json FILE] [--plot FILE.svg] [--sizes MIB ...] [--pairs N ...]

A producer process hands a bfloat16 tensor `[rows, 4096]` to a consumer process. The clock starts when the
producer starts to write and is read when the consumer has a tensor, and again when it has read every byte
of it (safetensors maps lazily: a tensor alone says little). The reservation is made before, as encoders
do while the tensor is being computed, and shown apart. Every arrival is checked by its sum. The runs of
all ways alternate, so that a busy machine disturbs them alike; medians are reported.

    memcpy      libc's memmove of the same bytes within the producer, into warm memory: the floor
    message     the message by which a consumer hears of a tensor, for all ways but the store
    store       copy into warm blocks of the region, seal; the consumer gets a view, no copy
    shm copy    multiprocessing.shared_memory: a block for each tensor, copied in and out
    st tmpfs    a safetensors file on the tmpfs, as vLLM's ECExampleConnector saves and loads it
    st disk     the same in the working directory
    redis       SET and GET through a Unix socket; a server of its own, unless --redis-url is given

With `--pairs`, that many producers and consumers work at once, each pair on its own tensor.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import resource_tracker
from pathlib import Path

from handover_ways.peers import Pair, Passage, Places
from handover_ways.svg import log_log_plot
from handover_ways.ways import WIDTH

from triptych_cache_store.testing import StoreProcess

MIB = 1 << 20
DEFAULT_SIZES_MIB = (0.0625, 0.25, 1, 4, 16, 64, 256)
WARM_UPS = 2
GOALS = {"st disk": 15, "st tmpfs": 8, "redis": 30}  # times slower than the store, at GOAL_MIB
GOAL_MIB = 16


@dataclass(frozen=True)
class Result:
    """Medians, in milliseconds."""

    way: str
    size_mib: float
    num_pairs: int
    prepare_ms: float  # before the start: the store's reservation, a file's directory
    copy_ms: float
    tensor_ms: float  # from the start of the write to the consumer's tensor
    read_ms: float  # ... until the consumer has read all of it
    after_write_ms: float  # from the end of the write to the consumer's tensor
    gib_per_s: float  # of all pairs together, read included
    of_memcpy: float  # bandwidth of the copy, in that of the memcpy just before it; 0: unknown


def repeats_of(mib: float, most: int) -> int:
    return max(3, min(most, int(most * 16 / max(mib, 16))))


def measure(pairs: list[Pair], ways: list[str], mib: float, repeats: int) -> list[Result]:
    """All ways in turn, `repeats` times."""
    rows = max(1, int(mib * MIB) // (2 * WIDTH))
    passages: dict[str, list[Passage]] = {way: [] for way in ways}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(repeats + WARM_UPS):
        for way in ways:
            for pair in pairs:
                pair.order(way, rows)
            for pair in pairs:
                pair.go()
            arrived = [pair.finish() for pair in pairs]
            if number >= WARM_UPS:
                passages[way] += arrived
                begin = min(each.started_at for each in arrived)
                end = max(each.started_at + each.read_s for each in arrived)
                rates[way].append(len(pairs) * rows * WIDTH * 2 / (end - begin) / 2**30)
    return [
        Result(
            way,
            mib,
            len(pairs),
            median_ms([each.prepare_s for each in passages[way]]),
            median_ms([each.copy_s for each in passages[way]]),
            median_ms([each.tensor_s for each in passages[way]]),
            median_ms([each.read_s for each in passages[way]]),
            median_ms([each.tensor_s - each.written_s for each in passages[way]]),
            statistics.median(rates[way]),
            of_memcpy(passages.get("memcpy", []), passages[way]),
        )
        for way in ways
    ]


def of_memcpy(memcpys: list[Passage], passages: list[Passage]) -> float:
    """Each copy against the memcpy of its own repeat: what else the machine does hits both."""
    ratios = [a.copy_s / b.copy_s for a, b in zip(memcpys, passages, strict=False) if b.copy_s]
    return statistics.median(ratios) if ratios else 0.0


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


# ---- what is needed around it --------------------------------------------------------------------
@contextlib.contextmanager
def redis_server(url: str | None, run_dir: Path) -> Iterator[str | None]:
    """The server of `url`, or one of our own if there is a redis-server to be found."""
    binary = shutil.which("redis-server") or shutil.which("redis-server", path=Path(sys.executable).parent)
    if url is not None or binary is None:
        yield url
        return
    socket = run_dir / "redis.sock"
    command = [binary, "--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([*command, "--dir", str(run_dir)], stdout=subprocess.DEVNULL)
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


def run(options: argparse.Namespace, pairs: list[Pair]) -> dict[str, object]:
    """All sizes with one pair, then all numbers of pairs with one size; prints tables."""
    run_dir = Path(tempfile.mkdtemp(prefix="triptych-bench-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="triptych-bench-", dir="."))
    most_mib = max(*options.sizes, options.pairs_size * max(options.pairs, default=0))
    settings = ["--reserve-fraction=0", "--high-watermark=1", "--log-level=INFO"]
    settings += [f"--region-dir={options.region_dir}"] if options.region_dir is not None else []
    settings += ["--large-pages"] if options.large_pages else []
    store = StoreProcess(run_dir, *settings, region_bytes=int(most_mib * 1.1 + 64) * MIB)
    load_before = load_average()
    try:
        with redis_server(options.redis_url, run_dir) as redis_url:
            store.start()
            places = Places(str(store.socket), run_dir, disk, redis_url)
            for pair in pairs:
                pair.connect(places)
            for pair in pairs:
                pair.wait_ready()
            ways = ["message", "memcpy", "store", "shm copy", "st tmpfs", "st disk"]
            ways += ["redis"] if redis_url is not None else []
            single = one_pair(options, pairs[:1], ways)
            results = single + many_pairs(options, pairs, ways[2:])
            for pair in pairs:
                pair.close()
            has_large_pages = "region has large pages" in store.log()
    finally:
        store.close()
        shutil.rmtree(run_dir)
        shutil.rmtree(disk)
    goals = goals_of(single)
    print(*goals, sep="\n")
    load = (load_before, load_average())
    print(f"load average {load[0]} to {load[1]}; large pages: {'yes' if has_large_pages else 'no'}")
    rows = [asdict(result) for result in results]
    return {"results": rows, "goals": goals, "load_average": load, "large_pages": has_large_pages}


def one_pair(options: argparse.Namespace, pairs: list[Pair], ways: list[str]) -> list[Result]:
    results: list[Result] = []
    print("milliseconds from the start of the write until every byte is read (until there is a tensor)")
    print(f"{'MiB':>8} " + "".join(f"{way:>20}" for way in ways))
    for mib in options.sizes:
        measured = measure(pairs, ways, mib, repeats_of(mib, options.repeats))
        results += measured
        cells = [
            f"{each.copy_ms:.3f}" if each.way == "memcpy" else f"{each.read_ms:.3f} ({each.tensor_ms:.3f})"
            for each in measured
        ]
        print(f"{mib:>8g} " + "".join(f"{cell:>20}" for cell in cells), flush=True)
    return results


def many_pairs(options: argparse.Namespace, pairs: list[Pair], ways: list[str]) -> list[Result]:
    results: list[Result] = []
    print(f"GiB/s of all pairs together, {options.pairs_size:g} MiB tensors, reading included")
    print(f"{'pairs':>8} " + "".join(f"{way:>20}" for way in ways))
    for number in options.pairs:
        measured = measure(pairs[:number], ways, options.pairs_size, max(3, options.repeats // 3))
        results += measured
        print(f"{number:>8} " + "".join(f"{each.gib_per_s:>20.2f}" for each in measured), flush=True)
    return results


def goals_of(results: list[Result]) -> list[str]:
    """What was wanted, and what came out, in words."""
    single = {(each.way, each.size_mib): each for each in results}
    lines = []
    for (way, mib), result in single.items():
        if way == "store":
            lines.append(
                f"{mib:g} MiB: copy at {result.of_memcpy:.2f} of memcpy, "
                f"from the end of the write to the consumer's tensor {result.after_write_ms:.3f} ms, "
                f"reservation before {result.prepare_ms:.3f} ms"
            )
    store = single.get(("store", GOAL_MIB))
    for way, goal in GOALS.items():
        other = single.get((way, GOAL_MIB))
        if store is not None and other is not None:
            lines.append(
                f"{GOAL_MIB} MiB: {way} takes {other.tensor_ms / store.tensor_ms:.1f} times as long "
                f"to a tensor, {other.read_ms / store.read_ms:.1f} times until it is read (wanted: {goal})"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--plot", type=Path, help="draw them here, as SVG")
    parser.add_argument("--sizes", type=float, nargs="+", default=DEFAULT_SIZES_MIB, metavar="MIB")
    parser.add_argument("--pairs", type=int, nargs="*", default=(1, 2, 4, 8), help="producers and consumers")
    parser.add_argument("--pairs-size", type=float, default=16, metavar="MIB", help="their tensors")
    parser.add_argument("--repeats", type=int, default=15, help="fewer for tensors above 16 MiB")
    parser.add_argument("--redis-url", help="compare with the tensor through this Redis")
    parser.add_argument("--region-dir", type=Path, help="a tmpfs for the region, e.g. one with huge=advise")
    parser.add_argument("--large-pages", action="store_true", help="the store asks for large pages")
    options = parser.parse_args()
    resource_tracker.ensure_running()  # one for all: they share the names of shared memory
    pairs = [Pair(number) for number in range(max(*options.pairs, 1) if options.pairs else 1)]
    try:
        report = run(options, pairs)
    finally:
        for pair in pairs:
            pair.close()
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))
    if options.plot is not None:
        options.plot.write_text(plot(report))


def plot(report: dict[str, object]) -> str:
    lines: dict[str, list[tuple[float, float]]] = {}
    rows = report["results"]
    for each in rows if isinstance(rows, list) else []:
        value = each["copy_ms"] if each["way"] == "memcpy" else each["read_ms"]
        points = lines.setdefault(each["way"], [])
        if each["num_pairs"] == 1 and each["size_mib"] not in dict(points):
            points.append((each["size_mib"], value))
    return log_log_plot("Handover between two processes", "MiB", "ms until every byte is read", lines)


if __name__ == "__main__":
    main()
