"""Whole requests, side by side in one run: text streams beside large images, Triptych and one vLLM engine.

    python benchmarks/whole_requests.py [--rounds 4] [--seconds 20] [--json FILE]

Both systems are up at once and take turns, so that a slow phase of the machine hits both. Cores are shared
fairly: the monolith may use all, Triptych's encoder gets the first half, its prefill_decode the second.
A round is `--seconds` of load on one system: `--texts` clients stream text without pause, and an image that
is new is sent every `--image-every` seconds. Only ratios mean anything.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import httpx
import psutil
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionUserMessageParam
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 600


@dataclass
class Sample:
    """What one system did in all its rounds."""

    gaps_ms: list[float] = field(default_factory=list)  # between two tokens of a text stream
    image_ttft_ms: list[float] = field(default_factory=list)
    again_ttft_ms: list[float] = field(default_factory=list)  # the same image a second time
    num_tokens: int = 0
    num_images: int = 0
    seconds: float = 0.0

    def summary(self) -> dict[str, float]:
        def percentile(values: list[float], share: float) -> float:
            return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else float("nan")

        return {
            "itl_p50_ms": percentile(self.gaps_ms, 0.5),
            "itl_p90_ms": percentile(self.gaps_ms, 0.9),
            "itl_p99_ms": percentile(self.gaps_ms, 0.99),
            "text_tokens_per_s": self.num_tokens / self.seconds if self.seconds else float("nan"),
            "image_ttft_p50_ms": statistics.median(self.image_ttft_ms)
            if self.image_ttft_ms
            else float("nan"),
            "again_ttft_p50_ms": statistics.median(self.again_ttft_ms)
            if self.again_ttft_ms
            else float("nan"),
            "num_images": float(self.num_images),
        }


def new_image(rng: random.Random, side: int) -> str:
    """A picture that no cache can know, as a data URL."""
    picture = Image.frombytes("RGB", (16, 16), rng.randbytes(16 * 16 * 3)).resize((side, side))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


async def _tokens(
    client: AsyncOpenAI, model: str, content: object, max_tokens: int
) -> AsyncGenerator[float, None]:
    """Seconds on the monotonic clock at which each chunk of the answer came."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[cast(ChatCompletionUserMessageParam, {"role": "user", "content": content})],
        temperature=0.0,
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    try:
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                yield time.monotonic()
    finally:
        await stream.close()


async def _text_load(client: AsyncOpenAI, model: str, until: float, sample: Sample) -> None:
    while time.monotonic() < until:
        before: float | None = None
        async for at in _tokens(client, model, "count to 200", 128):
            if before is not None:
                sample.gaps_ms.append((at - before) * 1e3)
            before = at
            sample.num_tokens += 1


async def _image_request(client: AsyncOpenAI, model: str, url: str, into: list[float]) -> None:
    start = time.monotonic()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "read the digits"}]
    async with contextlib.aclosing(_tokens(client, model, content, 8)) as tokens:
        into.append((await anext(tokens) - start) * 1e3)


async def _image_load(
    client: AsyncOpenAI,
    model: str,
    until: float,
    every_s: float,
    side: int,
    rng: random.Random,
    sample: Sample,
) -> None:
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < until:
            url = new_image(rng, side)
            group.create_task(_first_and_again(client, model, url, sample))
            await asyncio.sleep(every_s)


async def _first_and_again(client: AsyncOpenAI, model: str, url: str, sample: Sample) -> None:
    await _image_request(client, model, url, sample.image_ttft_ms)
    await _image_request(client, model, url, sample.again_ttft_ms)
    sample.num_images += 1


async def run_round(
    base_url: str, model: str, options: argparse.Namespace, rng: random.Random, sample: Sample
) -> None:
    """One round of load on one system."""
    async with AsyncOpenAI(base_url=base_url, api_key="none", timeout=120, max_retries=0) as client:
        start = time.monotonic()
        until = start + options.seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(options.texts):
                group.create_task(_text_load(client, model, until, sample))
            group.create_task(
                _image_load(client, model, until, options.image_every, options.image_side, rng, sample)
            )
        sample.seconds += time.monotonic() - start


# ---- the two systems -----------------------------------------------------------------------------
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pin(pid: int, cores: list[int]) -> None:
    """Every thread of a process and of its children."""
    process = psutil.Process(pid)
    for each in [process, *process.children(recursive=True)]:
        for task in Path(f"/proc/{each.pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), cores)


@contextlib.contextmanager
def triptych(model: Path) -> Iterator[str]:
    """The system of `./triptych up`, its engines on a half of the cores each."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="triptych-bench-") as run_dir,
        tempfile.TemporaryDirectory() as state,
    ):
        env = {**os.environ, "TRIPTYCH_RUN_DIR": run_dir, "TRIPTYCH_STATE_DIR": state}
        cli = [sys.executable, "-m", "triptych_cli"]
        try:
            subprocess.run(
                [*cli, "up", f"--model={model}", f"--port={port}"], env=env, check=True,
                timeout=START_TIMEOUT_S, stdout=sys.stderr,
            )  # fmt: skip
            cores = sorted(os.sched_getaffinity(0))
            half = max(1, len(cores) // 2)
            for service in json.loads((Path(run_dir) / "supervisor.json").read_text())["services"]:
                if service["name"].startswith("encoder"):
                    pin(service["pid"], cores[:half])
                elif service["name"].startswith("prefill_decode"):
                    pin(service["pid"], cores[half:] or cores)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            subprocess.run([*cli, "down"], env=env, check=False, timeout=120, stdout=sys.stderr)


@contextlib.contextmanager
def monolith(model: Path) -> Iterator[str]:
    """vLLM as it comes, on all cores."""
    port = free_port()
    defaults = {
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}",
                "--host=127.0.0.1", f"--port={port}", f"--served-model-name={model.name}", "--enforce-eager",
            ],
            env={**defaults, **os.environ}, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the monolithic vLLM did not start")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


def report(results: dict[str, dict[str, float]], options: argparse.Namespace) -> str:
    rows = [
        ("p50 gap between tokens, ms", "itl_p50_ms"),
        ("p90 gap between tokens, ms", "itl_p90_ms"),
        ("p99 gap between tokens, ms", "itl_p99_ms"),
        ("text tokens per second", "text_tokens_per_s"),
        ("first token about a new image, p50 ms", "image_ttft_p50_ms"),
        ("first token about the same image again, p50 ms", "again_ttft_p50_ms"),
        ("images answered", "num_images"),
    ]
    load = (
        f"{options.texts} text streams, one {options.image_side}×{options.image_side} image every "
        f"{options.image_every:g} s, {options.rounds} rounds of {options.seconds:g} s each, "
        f"{len(os.sched_getaffinity(0))} cores"
    )
    lines = [
        load,
        "",
        f"| {'':<46} | vLLM monolith | Triptych | Triptych ÷ monolith |",
        f"|{'-' * 48}|---------------|----------|---------------------|",
    ]
    for title, key in rows:
        mono, ours = results["monolith"][key], results["triptych"][key]
        lines.append(f"| {title:<46} | {mono:13.1f} | {ours:8.1f} | {ours / mono:19.2f} |")
    return "\n".join(lines)


async def measure(options: argparse.Namespace, urls: dict[str, str], model: str) -> dict[str, Sample]:
    rng = random.Random(options.seed)
    samples = {name: Sample() for name in urls}
    warm_up = argparse.Namespace(**{**vars(options), "seconds": min(5.0, options.seconds)})
    for url in urls.values():
        await run_round(url, model, warm_up, rng, Sample())
    for number in range(options.rounds):
        order = list(urls) if number % 2 == 0 else list(reversed(urls))
        for name in order:
            await run_round(urls[name], model, options, rng, samples[name])
            print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "digits-vl")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--image-every", type=float, default=1.0)
    parser.add_argument("--image-side", type=int, default=896, help="pixels; a multiple of 28")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with triptych(options.model) as ours, monolith(options.model) as mono:
        samples = asyncio.run(measure(options, {"monolith": mono, "triptych": ours}, options.model.name))
    results = {name: sample.summary() for name, sample in samples.items()}
    print(report(results, options))
    if options.json:
        settings = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(json.dumps({"options": settings, "results": results}, indent=2))


if __name__ == "__main__":
    main()
