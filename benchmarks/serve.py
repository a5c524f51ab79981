"""Any OpenAI endpoint under load: open loop, closed loop or replay, by vLLM's own `bench serve`.

    ./triptych bench serve --rates 1,2,4,8                      # Poisson arrivals
    ./triptych bench serve --rates 4 --burstiness 0.5           # gamma: bursts
    ./triptych bench serve --clients 1,4,16                     # closed loop
    ./triptych bench serve --replay arrivals.jsonl --speeds 1,2
    ./triptych bench serve --rates 4 --goodput ttft:2000 tpot:50 --num-prompts 200

Options that it does not know go to vLLM's `bench serve`. Without `--base-url` it asks the system that `up`
started on port 8000. Stages come from the trace files of that system. The exit code is 1 if a request failed.
"""

import argparse
import asyncio
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from load.json_reports import plain, write_json
from serving.load_points import LoadPoint, load_points
from serving.plots import gap_distribution, latency_over_load, timeline
from serving.serve_report import points_table, stages_table
from serving.stage_times import spans_between, stage_times

from triptych_cli.options import DEFAULT_PORT
from triptych_cli.settings import DEFAULT_MODEL, CliSettings
from triptych_cli.system.layout import lasting_layout


def main() -> int:
    options, passed_through = parse()
    # vLLM's code is slow to import, and not needed for --help.
    from serving.vllm_bench import as_json, parse_vllm_options, run_point

    points = load_points(options.rates, options.burstiness, options.clients, options.speeds)
    if not points:
        print("nothing to do: give --rates, --clients or --replay", file=sys.stderr)
        return 2
    try:
        model = options.model or first_model(options.base_url)
    except OSError as error:
        print(f"{options.base_url} does not answer ({error}): ./triptych up, or --base-url", file=sys.stderr)
        return 1
    args = parse_vllm_options(options.base_url, model, options.tokenizer, passed_through)
    results = []
    for number, point in enumerate(points):
        print(f"\n{point.title}", flush=True)
        results.append(asyncio.run(run_point(args, point, options.seed + number, options.replay)))
    measured = [(result.point, plain(result.figures)) for result in results]
    print("\n" + points_table(measured))
    stages = {}
    if options.traces_dir.is_dir():
        for result in results:
            spans = spans_between(options.traces_dir, result.start_ns, result.end_ns)
            stages[result.point.title] = found = stage_times(spans)
            if found:
                print(f"\nstages at {result.point.title}\n\n{stages_table(found)}")
    if options.json:
        report = {
            "options": {key: str(value) for key, value in vars(options).items()},
            "vllm_options": {key: str(value) for key, value in vars(args).items()},
            "points": [as_json(result) for result in results],
            "stages": {title: [each.as_json() for each in found] for title, found in stages.items()},
        }
        write_json(options.json, report)
    if options.plots:
        draw(options.plots, measured)
    failed = sum(bool(error) for _, figures in measured for error in figures.get("errors", ()))
    return 1 if failed else 0


def draw(folder: Path, measured: list[tuple[LoadPoint, dict[str, Any]]]) -> None:
    """`latency.svg`, `gaps.svg`, and a timeline of each point."""
    folder.mkdir(parents=True, exist_ok=True)
    loops = {point.loop for point, _ in measured}
    drawn = {"gaps.svg": gap_distribution(measured)}
    for loop in loops:
        of_loop = [each for each in measured if each[0].loop is loop]
        axis = {"open": "requests per second", "closed": "clients", "replay": "speed"}[loop.value]
        drawn[f"latency-{loop.value}.svg"] = latency_over_load(of_loop, axis)
    for number, (point, figures) in enumerate(measured):
        drawn[f"timeline-{number}.svg"] = timeline(figures, point.title)
    for name, text in drawn.items():
        if text:
            (folder / name).write_text(text)
            print(f"{folder / name}")


def api_root(url: str) -> str:
    """`url` up to and with `/v1`, which may be left out, as vLLM's own `--base-url` leaves it out."""
    return f"{url.rstrip('/').removesuffix('/v1')}/v1"


def first_model(base_url: str) -> str:
    """The name of the first model that the endpoint serves."""
    with urllib.request.urlopen(f"{base_url}/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def parse() -> tuple[argparse.Namespace, list[str]]:
    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(
        prog="bench serve", description=(__doc__ or "").splitlines()[0],
        epilog="Further options go to vLLM's bench serve.", allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument(
        "--base-url", type=api_root, default=f"http://127.0.0.1:{DEFAULT_PORT}/v1", help="with or without /v1"
    )
    parser.add_argument("--model", help="the name to ask for; default: the first that is served")
    parser.add_argument(
        "--tokenizer", default=str(DEFAULT_MODEL), help="the model's folder or name on a hub, to count tokens"
    )
    parser.add_argument(
        "--rates", type=numbers, default=[], help="open loop: requests per second, e.g. 1,2,4"
    )
    parser.add_argument("--burstiness", type=float, default=1.0, help="shape of the gaps; 1: Poisson")
    parser.add_argument("--clients", type=lambda text: [int(part) for part in text.split(",")], default=[])
    parser.add_argument("--replay", type=Path, help="arrivals, one JSON object per line (serving/replay.py)")
    parser.add_argument("--speeds", type=numbers, default=[], help="of the replay; default 1")
    parser.add_argument("--seed", type=int, default=0, help="of the contents; each load point has its own")
    parser.add_argument(
        "--traces-dir", type=Path, default=lasting_layout(CliSettings()).traces_dir, help="where spans are"
    )
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--plots", type=Path, help="a folder for SVG files")
    options, passed_through = parser.parse_known_args()
    if options.replay and not options.speeds:
        options.speeds = [1.0]
    if options.speeds and not options.replay:
        parser.error("--speeds needs --replay")
    return options, passed_through


if __name__ == "__main__":
    sys.exit(main())
