"""Many streams at once through one gateway process: none broken, and what each costs.

    python benchmarks/gateway_streams.py [--streams 1000] [--tokens 100] [--gap-ms 50] [--repeats 3]

Real processes: an upstream that answers as vLLM does and computes nothing, the gateway with a real Redis, and
a minimal proxy on aiohttp, each with one core; load and upstream have the other. Each token tells when it was
written, so its latency is that of its own way. Direct, by the proxy and by the gateway, one after the other;
what the gateway adds is the difference to the direct way. Exit status 1 if a stream was broken.
"""

import argparse
import asyncio
import json
import resource
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gateway_bench.arms import running_arms  # noqa: E402
from gateway_bench.streams import StreamsResult, StreamsWorkload, run_streams  # noqa: E402

PERCENTILES = (50, 99, 99.9)
FILES_PER_STREAM = 2  # the client's end, and the upstream's
OTHER_FILES = 256


def percentile(values: list[float], percent: float) -> float:
    """Percentile of sorted values."""
    return values[min(len(values) - 1, int(len(values) * percent / 100))]


def allow_files(num_streams: int) -> None:
    """Raise the limit of open files, which child processes inherit."""
    needed = FILES_PER_STREAM * num_streams + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        sys.exit(
            f"{num_streams} streams need {needed} open files; the system allows {hard}: raise `ulimit -Hn`"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def figures(arm: str, results: list[StreamsResult], direct: dict[str, float]) -> dict[str, float]:
    values = sorted(each for result in results for each in result.latency_ms)
    found = {f"p{percent:g}_ms": percentile(values, percent) for percent in PERCENTILES}
    found["broken"] = sum(result.num_broken for result in results)
    found["kib_per_stream"] = results[0].kib_per_stream  # later ones find memory that is there already
    found["cpu_share"] = sum(result.cpu_s for result in results) / sum(result.seconds for result in results)
    added = "" if not direct else f", p99 {found['p99_ms'] - direct['p99_ms']:+.2f} ms to direct"
    shown = "  ".join(f"p{percent:g} {found[f'p{percent:g}_ms']:7.2f} ms" for percent in PERCENTILES)
    print(
        f"{arm:14} {shown}  {found['kib_per_stream']:6.1f} KiB a stream  {found['cpu_share']:4.0%} of a core"
    )
    print(f"{'':14} {found['broken']:.0f} streams broken, {len(values)} tokens{added}")
    for error in [error for result in results for error in result.errors][:3]:
        print(f"  {error}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--gap-ms", type=float, default=50.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    allow_files(options.streams)
    opening_ms = max(1000.0, 2.0 * options.streams)  # streams are opened one after the other
    workload = StreamsWorkload("streams", True, options.streams, options.tokens, opening_ms, options.gap_ms)

    async def measure() -> int:
        found: dict[str, dict[str, float]] = {}
        async with running_arms({}, {"TRIPTYCH_MAX_REQUESTS_IN_FLIGHT": str(options.streams)}) as arms:
            for arm in arms:
                results = [await run_streams(arm, workload) for _ in range(options.repeats)]
                found[arm.name] = figures(arm.name, results, found.get(arms[0].name, {}))
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=2) + "\n")
        return 1 if any(each["broken"] for each in found.values()) else 0

    return asyncio.run(measure())


if __name__ == "__main__":
    sys.exit(main())
