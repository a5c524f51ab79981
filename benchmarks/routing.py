"""Conversations about shared images before two prefill_decodes, under each way to choose one.

    ./triptych bench routing [--scale s] [--rounds 5] [--arms affinity,round_robin] [--json FILE]

One encoder and two prefill_decodes are started once; a gateway for each arm stands before them, and the arms
take turns. An arm is a file of routing profiles in benchmarks/routing_policies. Hit rates are vLLM's own
count of tokens in its prefix caches. The exit code is 0 whatever came, and 1 if a request failed.
"""

import argparse
import asyncio
import signal
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

from comparison.model_folder import model_folder
from comparison.model_shapes import SCALES
from load.contents import TextMaker
from load.json_reports import write_json
from routing_policies import results
from routing_policies.arms import ARMS
from routing_policies.conversations import Shape
from routing_policies.gateways import running_gateways, urls_of_engines
from routing_policies.measuring import RoutingPlan, measure
from routing_policies.prefix_caches import read_counts

from triptych_cli.settings import DEFAULT_MODEL, CliSettings

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.real.system import running_system  # noqa: E402

ENGINE_ARGS = "--dtype=float32 --max-model-len 8192 --max-num-batched-tokens 2048 --block-size 32"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench routing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", choices=list(SCALES), default="s")
    parser.add_argument("--rounds", type=int, default=5, help="that count; one more warms up")
    parser.add_argument("--arms", default=",".join(ARMS), help="of %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of all contents")
    parser.add_argument("--engine-args", default=ENGINE_ARGS, help="of vLLM, for all engines")
    for each in fields(Shape):
        name = f"--{each.name.replace('_', '-')}"
        parser.add_argument(name, type=int, default=each.default, help="of a round (%(default)s)")
    parser.add_argument("--cache", type=Path, default=CliSettings().state_dir / "bench-models")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    options.arms = options.arms.split(",")
    if unknown := set(options.arms) - ARMS.keys():
        parser.error(f"no arm {', '.join(sorted(unknown))}; there are: {', '.join(ARMS)}")
    return options


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended
    options = parse()
    scale = SCALES[options.scale]
    model = model_folder(scale, DEFAULT_MODEL, options.cache)
    shape = Shape(**{each.name: getattr(options, each.name) for each in fields(Shape)})
    args = [f"--encoder-args={options.engine_args}", f"--prefill-decode-args={options.engine_args}"]
    with running_system("--prefill-decodes=2", *args, model=model) as system:
        redis_url = f"unix://{system.run_dir / 'redis.sock'}"
        engines = urls_of_engines(redis_url)
        with running_gateways(redis_url, {arm: ARMS[arm] for arm in options.arms}) as urls:
            plan = RoutingPlan(
                model.name,
                TextMaker(model),
                scale.image_side,
                shape,
                options.rounds,
                options.seed,
                partial(read_counts, engines),
            )
            measured = asyncio.run(measure(plan, urls))
    print(results.table(measured))
    held = results.bars(measured)
    for bar in held:
        print(f"{bar.name}: {bar.ratio}: {'held' if bar.is_held else 'missed'}")
    failed = results.failures(measured)
    for failure in failed:
        print(f"failed: {failure}", file=sys.stderr)
    if options.json:
        figures = {
            "options": {key: str(value) for key, value in vars(options).items()},
            "arms": results.as_json(measured),
            "bars": {bar.name: [vars(bar.ratio), bar.is_held] for bar in held},
            "failures": failed,
        }
        write_json(options.json, figures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
