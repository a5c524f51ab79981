"""A model of a deployment: fitted to a real run, checked against it, and asked about large ones.

    python benchmarks/simulate.py run RUN                         a real system under the workloads
    python benchmarks/simulate.py calibrate RUN [--out FILE]      stage times out of that run's traces
    python benchmarks/simulate.py estimate                        stage times on a GPU, not measured
    python benchmarks/simulate.py check RUN [--times FILE]        predicted beside measured
    python benchmarks/simulate.py scale [STUDY ...] [--charts DIR]  the tables of docs/operations/scaling.md
    python benchmarks/simulate.py one --encoders 2 --prefill-decodes 6 --images 1 --rate 40

A discrete-event model, on simpy. Same seed, same figures.
See docs/operations/scaling.md for what it leaves out.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from simulation.calibration import CalibrationError, ControlPlaneCosts, fit
from simulation.gpu_estimates import estimate
from simulation.parameters import FOLDER, Deployment, StageTimes
from simulation.predictions import compare, table
from simulation.real_runs import RealRun, real_system, run_workloads
from simulation.studies import Case, chat, monolith, rates_table, triptych
from simulation.tables import STUDIES
from simulation.workload import check_workloads

ROOT = Path(__file__).resolve().parents[1]
RUN_FILE, CONTROL_FILE = "run.json", FOLDER / "control_plane.json"
GPU_TIMES, CPU_TIMES = "h100-qwen2.5-vl-7b", "cpu-digits-vl"
ONE_HOST = Deployment("one host", ((1, 1),))


def real_run(options: argparse.Namespace) -> None:
    """Leaves RUN/run.json and, below RUN, the traces."""
    options.run.mkdir(parents=True, exist_ok=True)
    workloads, path = check_workloads(options.seconds), options.run / RUN_FILE
    with real_system(options.model, options.run) as (url, traces):
        run = RealRun(len(os.sched_getaffinity(0)), options.seconds, str(traces))
        asyncio.run(
            run_workloads(
                url, options.model.name, workloads, run, path, seed=options.seed, rounds=options.rounds
            )
        )


def calibrate(options: argparse.Namespace) -> None:
    run = RealRun.load(options.run / RUN_FILE)
    control = ControlPlaneCosts(**json.loads(options.control.read_text()))
    times = fit(run, check_workloads(run.seconds_each), Path(run.traces), control, name=CPU_TIMES)
    if options.out:
        times.save(options.out)
    print(times.to_json())


def estimate_gpu(options: argparse.Namespace) -> None:
    times = estimate(StageTimes.load(options.times))
    times.save(options.out or FOLDER / f"{GPU_TIMES}.json")
    print(times.to_json())


def check(options: argparse.Namespace) -> None:
    run = RealRun.load(options.run / RUN_FILE)
    times = StageTimes.load(options.times)
    print(table(compare(times, ONE_HOST, check_workloads(run.seconds_each), run)))


def scale(options: argparse.Namespace) -> None:
    times = StageTimes.load(options.times)
    for name in options.studies or STUDIES:
        study = STUDIES[name]
        print(f"### {study.title}\n\n" + "\n".join(study.lines(times, options.charts)) + "\n", flush=True)


def one(options: argparse.Namespace) -> None:
    times = StageTimes.load(options.times)
    hosts = [(options.encoders, options.prefill_decodes)] * options.hosts
    deployment = (
        monolith(options.hosts, options.encoders + options.prefill_decodes)
        if options.monolith
        else triptych(hosts, overlap=not options.no_overlap)
    )
    kind = chat(options.images, words=options.words, tokens=options.tokens, known=options.known)
    lines, _ = rates_table(Case("one", times, deployment, ((kind, 1.0),)), options.rate)
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parts = parser.add_subparsers(required=True)

    part = parts.add_parser("run", help="a real system under the workloads")
    part.add_argument("run", type=Path, help="folder for what it did, and its traces")
    part.add_argument("--model", type=Path, default=ROOT / "models" / "digits-vl")
    part.add_argument("--seconds", type=float, default=4.0, help="of each workload in a round")
    part.add_argument("--rounds", type=int, default=3)
    part.add_argument("--seed", type=int, default=0)
    part.set_defaults(do=real_run)

    part = parts.add_parser("calibrate", help="stage times out of a run's traces")
    part.add_argument("run", type=Path)
    part.add_argument("--control", type=Path, default=CONTROL_FILE, help="costs of the control plane")
    part.add_argument("--out", type=Path)
    part.set_defaults(do=calibrate)

    part = parts.add_parser("estimate", help="stage times on a GPU, from published figures")
    part.add_argument("--times", type=Path, default=Path(CPU_TIMES), help="a measured set, for CPU times")
    part.add_argument("--out", type=Path)
    part.set_defaults(do=estimate_gpu)

    part = parts.add_parser("check", help="predicted beside measured")
    part.add_argument("run", type=Path)
    part.add_argument("--times", type=Path, default=Path(CPU_TIMES))
    part.set_defaults(do=check)

    part = parts.add_parser("scale", help="the tables of docs/operations/scaling.md")
    part.add_argument("studies", nargs="*", choices=[*STUDIES, []], help="default: all")
    part.add_argument("--times", type=Path, default=Path(GPU_TIMES))
    part.add_argument("--charts", type=Path, help="folder for the drawings")
    part.set_defaults(do=scale)

    part = parts.add_parser("one", help="one deployment of hosts that are alike")
    part.add_argument("--times", type=Path, default=Path(GPU_TIMES))
    part.add_argument("--hosts", type=int, default=1)
    part.add_argument("--encoders", type=int, default=2)
    part.add_argument("--prefill-decodes", type=int, default=6)
    part.add_argument("--monolith", action="store_true", help="the same number of GPUs, each with the tower")
    part.add_argument("--no-overlap", action="store_true")
    part.add_argument("--images", type=int, default=1, help="of a request, 1092 × 1092 pixels")
    part.add_argument("--words", type=int, default=200)
    part.add_argument("--tokens", type=int, default=200, help="of an answer")
    part.add_argument("--known", type=float, default=0.0, help="share of images whose tensor is there")
    part.add_argument("--rate", type=float, nargs="+", default=[10.0, 20.0, 40.0], help="requests/s")
    part.set_defaults(do=one)

    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    try:
        options.do(options)
    except (CalibrationError, OSError, ValueError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
