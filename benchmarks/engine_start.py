"""CPU seconds of an engine's start, by process, and seconds until it is ready.

    ./triptych bench engine_start [--rounds 3] [--model FOLDER] [--json FILE] [options of up]

Each round starts a system by `up` with one encoder and one prefill_decode, and reads the CPU time of their
processes when all are ready. Wall seconds depend on what else the machine does; CPU seconds hardly do.
"""

import argparse
import json
import signal
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import psutil
from load.json_reports import write_json

from triptych_cli.settings import DEFAULT_MODEL
from triptych_cli.supervisor.state import read_status

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.real.system import System, running_system  # noqa: E402


def costs(system: System) -> dict[str, float]:
    """Return CPU seconds by service and process, and each service's seconds from start to readiness."""
    status = read_status(system.run_dir / "supervisor.json")
    if status is None:
        raise RuntimeError("the system has no state file")
    found: defaultdict[str, float] = defaultdict(float)
    for service in status.services:
        if not service.stage or service.pid is None:
            continue
        host = psutil.Process(service.pid)
        found[f"{service.name} wall"] = service.since - host.create_time()
        for process in (host, *host.children(recursive=True)):
            times = process.cpu_times()
            seconds = times.user + times.system
            found[f"{service.name} {kind_of(process, host)}"] += seconds
            found[f"{service.name} all"] += seconds
    return dict(found)


def kind_of(process: psutil.Process, host: psutil.Process) -> str:
    if process.pid == host.pid:
        return "host"
    return "EngineCore" if "EngineCore" in process.name() + " ".join(process.cmdline()) else "others"


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options, up = parser.parse_known_args()
    rounds: list[dict[str, float]] = []
    for _ in range(options.rounds):
        with running_system(*up, model=options.model) as system:
            rounds.append(costs(system))
    names = sorted({name for each in rounds for name in each})
    medians = {name: statistics.median(each.get(name, 0.0) for each in rounds) for name in names}
    print(json.dumps({name: round(value, 1) for name, value in medians.items()}, indent=1))
    if options.json is not None:
        write_json(options.json, {"median": medians, "rounds": rounds})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
