"""Runs one load point with the code of vLLM's own `bench serve`: its datasets, clients and report.

`vllm` itself is not called as a command: with the distribution for CPUs it looks up another one's version.
"""

import argparse
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load.contents import TextMaker
from vllm.benchmarks import serve as vllm_serve
from vllm.benchmarks.datasets import SampleRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from serving.load_points import LoadPoint, Loop
from serving.replay import messages, read_arrivals

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
METRICS = ("ttft", "tpot", "itl", "e2el")
IMAGE_DEFAULTS = (
    "--dataset-name=random-mm", "--random-input-len=64", "--random-output-len=32",
    "--random-mm-base-items-per-request=1", "--random-mm-num-mm-items-range-ratio=0",
    '--random-mm-limit-mm-per-prompt={"image": 16, "video": 0}',
    "--random-mm-bucket-config={(448, 448, 1): 1.0}",
)  # fmt: skip
"""Default options: one new image of 448 × 448 pixels in each request; the user's options override."""


@dataclass(frozen=True)
class PointResult:
    """Result of a load point: vLLM's `figures` with lists for every request, wall-clock times in ns."""

    point: LoadPoint
    figures: dict[str, Any]
    start_ns: int
    end_ns: int


def parse_vllm_options(
    base_url: str, model: str, tokenizer: Path | str, passed_through: Sequence[str]
) -> argparse.Namespace:
    """Options of vLLM's `bench serve`, with the user's after ours."""
    parser = FlexibleArgumentParser()
    vllm_serve.add_cli_args(parser)
    options = [
        "--backend=openai-chat", "--endpoint=/v1/chat/completions",
        f"--base-url={base_url.removesuffix('/v1')}",
        f"--model={model}", f"--tokenizer={tokenizer}", "--temperature=0", "--ignore-eos", "--num-prompts=50",
        "--num-warmups=2", "--disable-tqdm", f"--percentile-metrics={','.join(METRICS)}",
        f"--metric-percentiles={','.join(f'{share:g}' for share in PERCENTILES)}", *IMAGE_DEFAULTS,
    ]  # fmt: skip
    args: argparse.Namespace = parser.parse_args([*options, *passed_through])
    args.save_detailed = True
    return args


async def run_point(args: argparse.Namespace, point: LoadPoint, seed: int, trace: Path | None) -> PointResult:
    """Run one load point; `seed` is of its contents, `trace` the file of a replay."""
    args = copy.copy(args)
    args.seed = seed
    start_ns = time.time_ns()
    if point.loop is Loop.REPLAY:
        if trace is None:
            raise ValueError("a replay needs a trace")
        figures = await _replay(args, trace, point.speed)
    else:
        args.request_rate = point.request_rate
        args.burstiness = point.burstiness
        args.max_concurrency = point.max_concurrency
        figures = await vllm_serve.main_async(args)
    return PointResult(point, figures, start_ns, time.time_ns())


async def _replay(args: argparse.Namespace, trace: Path, speed: float) -> dict[str, Any]:
    texts = TextMaker(Path(args.tokenizer))
    requests = [
        SampleRequest(
            prompt="",
            prompt_len=arrival.text_tokens,
            expected_output_len=arrival.output_tokens,
            request_id=f"{args.request_id_prefix}{number}",
            timestamp=arrival.at_s / speed,
            chat_messages=said,
        )
        for number, (arrival, said) in enumerate(messages(read_arrivals(trace), texts, args.seed))
    ]
    result: dict[str, Any] = await vllm_serve.benchmark(
        task_type=vllm_serve.TaskType.GENERATION,
        endpoint_type=args.backend,
        api_url=f"{args.base_url}{args.endpoint}",
        base_url=args.base_url,
        model_id=args.model,
        model_name=args.served_model_name,
        tokenizer=vllm_serve.get_tokenizer(args.tokenizer),
        input_requests=requests,
        logprobs=None,
        request_rate=float("inf"),
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=args.num_warmups,
        profile=False,
        selected_percentile_metrics=list(METRICS),
        selected_percentiles=list(PERCENTILES),
        ignore_eos=True,
        goodput_config_dict=vllm_serve.check_goodput_args(args),
        max_concurrency=None,
        lora_modules=None,
        extra_headers=None,
        extra_body={"temperature": 0.0},
        ready_check_timeout_sec=args.ready_check_timeout_sec,
        self_timed=True,
    )
    return result


def as_json(result: PointResult) -> dict[str, Any]:
    """Result as plain data, without the texts that the model made up."""
    kept = {key: value for key, value in result.figures.items() if key != "generated_texts"}
    return {"title": result.point.title, "start_ns": result.start_ns, "end_ns": result.end_ns, **kept}
