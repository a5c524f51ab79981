"""Soak of the whole system: 20 callers, and a random fault whenever it is healthy again.

    python benchmarks/soak_system.py [--engine fast|real|hosts] [--topology e+pd|all] [--minutes N]
        [--faults N] [--seed N] [--json FILE]

Real processes, Redis, shared memory and HTTP. `fast`: vLLM is stood in for by engines whose answer follows
from the bytes of the tensors, and half of the faults come at a random step of the protocol
(`system_soak.fast`). `real`: vLLM on the CPU with the demo model; the right answers come from a monolithic
vLLM (`system_soak.real`). `hosts`: as `fast`, on three hosts with a store and a fabric agent each; half of
the faults are of the network between them (`system_soak.hosts`). It needs root, and iproute2.
`--topology all`: instances of every role side by side, of `fast` alone.

kill -9, SIGSTOP and slow-down of every service and of Redis. Exit status 1 if there was a wrong answer, a
request that hung, an error that is not documented, or anything left over in the end; or if less than 99 % of
the requests that had no token yet when an instance of the language model died were answered.
"""

import argparse
import asyncio
import importlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from system_soak.fault_injector import MIN_FAULTS  # noqa: E402
from system_soak.report import print_report, wear_out  # noqa: E402

ENGINES = ("fast", "real", "hosts")
LOG_LINES = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="real: vLLM on the CPU")
    parser.add_argument("--topology", default="e+pd", help="all: instances of every role")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--faults", type=int, default=MIN_FAULTS, help="at least so many, however long it takes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--callers", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kind = importlib.import_module(f"system_soak.{options.engine}")  # real: imports much
    if options.topology not in kind.TOPOLOGIES:
        parser.error(f"engines of kind {options.engine} have the topologies {', '.join(kind.TOPOLOGIES)}")
    with kind.opened(options.callers, options.seed, options.topology) as (target, load):
        report = asyncio.run(wear_out(target, load, options.minutes, options.seed, options.faults))
        if report["faults"]:
            print(target.log_ends(LOG_LINES), file=sys.stderr)
    report["seed"] = options.seed
    print_report(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
