"""Cost of the gateway for a text request: a direct call, a minimal proxy, and the gateway, side by side.

    python benchmarks/gateway_cost.py [--rounds 7] [--seconds 2] [--other LABEL=CHECKOUT ...] [--json FILE]

Real processes, all up at once: an upstream that answers as vLLM does and computes nothing, a minimal proxy on
aiohttp, a gateway of this checkout with a real Redis, and one of each checkout named by `--other`. Each arm
has one core, load and upstream the other; the arms take turns, request by request where there is one client.

    1 client                 one request after the other; an event each millisecond
    32 clients, paced        the model's first token after 50 ms, then one each 10 ms, as a busy instance does
    32 clients, saturated    the model takes no time: as many requests as the arm's core can do

Added latency is the arm's p50 less the direct call's, to the first byte of a streamed answer, to the end of a
whole one. Bars, for streamed and whole answers:

    added latency, 1 client and 32 clients paced    <= 1 ms p50, and <= 2 times the proxy's
    requests/s on one core, saturated               >= 0.5 times the proxy's
    commands to Redis for a text request            0

CPU milliseconds per request are the scheduler's count for all threads of the arm; where other processes take
part of its core they tell more than requests/s. Then the commands and round trips to Redis of a request with
a new image, a known one, and text (`gateway_bench.redis_counts`). Exit status 1 if a bar is missed.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gateway_bench.arms import running_arms  # noqa: E402
from gateway_bench.redis_counts import count_redis  # noqa: E402
from gateway_bench.report import bars_of, print_bars, print_counts, print_figures, redis_bar  # noqa: E402
from gateway_bench.rounds import run_rounds  # noqa: E402


def _other(text: str) -> tuple[str, Path]:
    label, _, checkout = text.partition("=")
    return label, Path(checkout)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each arm and workload, in each round")
    parser.add_argument("--other", type=_other, action="append", default=[], help="LABEL=CHECKOUT")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    async def measure() -> int:
        async with running_arms(dict(options.other)) as arms:
            figures = await run_rounds(arms, options.rounds, options.seconds)
        counts = await count_redis()
        print_figures(figures)
        print_counts(counts)
        bars = [*bars_of(figures), redis_bar(counts)]
        print_bars(bars)
        if options.json is not None:
            report = {
                "figures": [asdict(each) for each in figures],
                "redis": [asdict(each) for each in counts],
                "bars": [asdict(each) for each in bars],
            }
            options.json.write_text(json.dumps(report, indent=2) + "\n")
        return 0 if all(bar.is_met for bar in bars) else 1

    return asyncio.run(measure())


if __name__ == "__main__":
    sys.exit(main())
