"""Search for the set-up of `up` that serves most requests within their objectives, under one workload.

    ./triptych bench tune [--scale m] [--workload saturation_mixed] [--json FILE]
                          [--axis encoders=1,2] [--axis TRIPTYCH_NUM_SLOTS=2,8] ...

Every combination is started, measured and ended; the better half again, with twice as many repeats, until one
is left. Goodput counts what kept the objectives: `--ttft` and `--stall`, by default the scale's own. The exit
code is 1 if no set-up could be measured.
"""

import argparse
import asyncio
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from comparison.arms import ARMS, Arm
from comparison.bars import objectives
from comparison.cores import CorePlan, plan_cores
from comparison.measuring import Plan, measure, print_progress
from comparison.model_folder import model_folder
from comparison.model_shapes import SCALES
from comparison.systems import EngineOptions, StartError, running
from comparison.workloads import WORKLOADS
from load.contents import TextMaker
from load.figures import median
from load.json_reports import write_json
from tuning.grid import AxisFormatError, Setup, parse_axes, setups, survivors
from tuning.tune_report import setups_table

from triptych_cli.settings import DEFAULT_MODEL, CliSettings

NOT_A_NUMBER = float("nan")


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended
    options = parse()
    scale = SCALES[options.scale]
    model = model_folder(scale, DEFAULT_MODEL, options.cache)
    engine = EngineOptions(model, tuple(shlex.split(options.engine_args)))
    wanted = objectives(scale)
    wanted = replace(
        wanted, ttft_ms=options.ttft or wanted.ttft_ms, stall_ms=options.stall or wanted.stall_ms
    )
    plan = Plan(
        scale, [WORKLOADS[options.workload]], 1, options.seed, wanted, TextMaker(model), options.seconds
    )
    left = setups(options.axes)
    found: dict[Setup, list[dict[str, float]]] = {}
    repeats = 1
    while left:
        print_progress(f"{len(left)} set-ups, {repeats} repeat{'s' if repeats > 1 else ''} each")
        goodput = {}
        for setup in left:
            goodput[setup] = measured = try_setup(setup, plan, engine, plan_cores(), repeats, found)
            print_progress(f"  {setup.title}: {measured:.2f} good requests/s")
        left = survivors(goodput) if len(left) > 1 else []
        repeats *= 2
    return show(options, found)


def try_setup(
    setup: Setup,
    plan: Plan,
    engine: EngineOptions,
    cores: CorePlan,
    repeats: int,
    found: dict[Setup, list[dict[str, float]]],
) -> float:
    """Start, measure and end one. Its figures join `found`; NaN: it did not start, or requests failed."""
    arm = arm_of(setup)
    try:
        with running(arm, engine, cores) as system:
            seed = plan.seed + len(found.get(setup, ()))
            measured = asyncio.run(measure([system], replace(plan, repeats=repeats, seed=seed)))
    except StartError as error:
        print_progress(f"  {error}")
        return NOT_A_NUMBER
    for failure in measured.failures[:3]:
        print_progress(f"  failed: {failure}")
    if measured.failures:
        return NOT_A_NUMBER
    workload = plan.workloads[0].name
    found.setdefault(setup, []).extend(measured.figures[workload][arm.name])
    return median(measured.of(workload, arm.name, "all.goodput_per_s"))


def arm_of(setup: Setup) -> Arm:
    """Arm with this set-up; Triptych assigns the cores."""
    base = ARMS["text_first"]
    return replace(base, name="tuned", num_encoders=setup.num_encoders, env={**base.env, **dict(setup.env)})


def show(options: argparse.Namespace, found: dict[Setup, list[dict[str, float]]]) -> int:
    if not found:
        print("no set-up could be measured", file=sys.stderr)
        return 1
    print(setups_table(found))
    if options.json:
        report = {
            "options": {key: str(value) for key, value in vars(options).items()},
            "setups": [{**asdict(setup), "repeats": repeats} for setup, repeats in found.items()],
        }
        write_json(options.json, report)
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench tune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", choices=list(SCALES), default="m")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="saturation_mixed")
    parser.add_argument(
        "--axis", action="append", default=[], metavar="NAME=VALUE,VALUE",
        help="encoders, or a setting's variable; replaces the default axes",
    )  # fmt: skip
    parser.add_argument("--ttft", type=float, help="objective of the first token, ms")
    parser.add_argument("--stall", type=float, help="objective of the longest gap between tokens, ms")
    parser.add_argument("--engine-args", default="--max-model-len 8192", help="of vLLM, for all engines")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each round of a load")
    parser.add_argument("--seed", type=int, default=0, help="of all contents")
    parser.add_argument("--cache", type=Path, default=CliSettings().state_dir / "bench-models")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args(arguments)
    try:
        options.axes = parse_axes(options.axis)
    except AxisFormatError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    sys.exit(main())
