"""Cost of an encoder on another host, and speed of the fabric. Hosts are network namespaces.

    python benchmarks/several_hosts.py [--parts throughput,handovers] [--repeats 15] [--json FILE]

`throughput`: entries of 16 MiB from one host's store to another's by two fabric agents, in turn with a bare
socket on the same cable (and NIXL over UCX's TCP, and iperf3, where they are installed).

`handovers`: three systems with stand-ins for vLLM take turns, at `--rate` bits a second: an encoder on
another host, one on the same host, and that without a fabric agent. First tokens of a new image whose tensor
has 9 MiB, of four, of a small one, and sixteen requests at once. Bars:

    agent ÷ socket, bytes a second                                         >= 0.8
    one image: added first token ÷ (bytes ÷ bandwidth + one round trip)    <= 1.2
    four images: added first token ÷ the same of one image                 <= 1.2
    one host, without ÷ with an idle agent: latency; sixteen at once       >= 0.98

Ratios are of pairs of one run, with 95 % intervals. Needs root, and iproute2. Exit status 1 if a bar is
missed, or a request failed.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from load.json_reports import write_json

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hosts_bench import handovers, hosts_report, throughput  # noqa: E402

from tests.support.hosts.namespaces import why_no_namespaces  # noqa: E402

PARTS = ("throughput", "handovers")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rate", type=int, default=1_000_000_000, help="of a host's network, bits a second")
    parser.add_argument("--entries", type=int, default=32, help="of 16 MiB, in one repeat of `throughput`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (why := why_no_namespaces()) is not None:
        print(why, file=sys.stderr)
        return 2
    parts = options.parts.split(",")
    bars, report, failures = [], {"repeats": options.repeats, "rate": options.rate}, []
    if "throughput" in parts:
        rates = asyncio.run(throughput.measure(options.entries, options.repeats, None))
        bars += hosts_report.throughput_bars(rates)
        report["bytes_per_s"] = rates
        print("\n".join(hosts_report.throughput_lines(rates)))
    if "handovers" in parts:
        figures = handovers.measure(options.repeats, options.rate, options.seed)
        failures = figures.failures
        bars += hosts_report.handover_bars(figures, options.rate)
        report |= _as_json(figures)
        print("\n".join(hosts_report.handover_lines(figures)))
    print("\n".join(map(str, [*bars, *(f"FAILED {each}" for each in failures)])))
    if options.json is not None:
        write_json(options.json, report | {"bars": [hosts_report.bar_as_json(bar) for bar in bars]})
    return 1 if failures or not all(bar.is_held for bar in bars) else 0


def _as_json(figures: handovers.HandoverFigures) -> dict[str, Any]:
    return {
        "ttft_s": {f"{arm} {workload}": each for (arm, workload), each in figures.ttft_s.items()},
        "burst_s": figures.burst_s,
        "round_trip_s": figures.round_trip_s,
        "failures": figures.failures,
    }


if __name__ == "__main__":
    sys.exit(main())
