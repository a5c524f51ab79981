"""Images on a busy machine: Triptych and one vLLM engine take turns beside busy loops.

    ./triptych bench busy [--loops 8] [--images 200] [--streams 1] [--set VARIABLE=VALUE ...] [--json FILE]

Each new image, from 64x64 to 6000x4000 pixels, is sent to both, one after the other, and timed to the end of
the answer. `--loops` processes compute without a pause meanwhile, at normal priority, in a session of their
own. With `--streams`, so many answers of text are streamed by the same system at that time; their gaps are
reported. Ratios are of medians and of 99th percentiles. The exit code is 1 if a request failed, or if a
service ended.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from comparison.arms import ARMS, Arm
from comparison.cores import plan_cores
from comparison.systems import EngineOptions, RunningSystem, running
from load.client import Answer, Endpoint, Question, ask, new_session
from load.contents import new_image, text_part
from load.figures import percentile
from load.json_reports import write_json

from triptych_cli.settings import DEFAULT_MODEL

SIZES = (
    (64, 64), (224, 224), (336, 672), (640, 480), (1000, 1000), (1280, 720), (2000, 2000), (3000, 2000),
    (6000, 4000),
)  # fmt: skip
LOOPS = """
import os, sys
for _ in range(int(sys.argv[1]) - 1):
    if os.fork() == 0:
        break
while True:
    pass
"""
STREAM_TOKENS = 400
DEFAULT_ENGINE_ARGS = "--dtype=float32 --max-model-len=8192 --max-num-batched-tokens=8192"


@dataclass
class Figures:
    """Figures measured of one system."""

    latencies_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended
    options = parse()
    settings = dict(each.split("=", 1) for each in options.set)
    text_first = ARMS["text_first"]
    arms = [ARMS["monolith"], Arm(**{**vars(text_first), "env": {**text_first.env, **settings}})]
    engine = EngineOptions(options.model, tuple(options.engine_args.split()))
    with contextlib.ExitStack() as stack:
        if options.loops_at_start:
            stack.enter_context(busy(options.loops))
        systems = [stack.enter_context(running(arm, engine, plan_cores())) for arm in arms]
        if not options.loops_at_start:
            stack.enter_context(busy(options.loops))
        figures = asyncio.run(measure(systems, options))
        ended = [
            name for system in systems for name, pid in system.services.items() if not psutil.pid_exists(pid)
        ]
    return report(options, figures, ended)


@contextlib.contextmanager
def busy(num_loops: int) -> Iterator[None]:
    """Run busy loops, in one session as those of a shell, until the block ends."""
    if not num_loops:
        yield
        return
    loops = subprocess.Popen([sys.executable, "-c", LOOPS, str(num_loops)], start_new_session=True)
    try:
        yield
    finally:
        os.killpg(loops.pid, signal.SIGKILL)
        loops.wait()


async def measure(systems: Sequence[RunningSystem], options: argparse.Namespace) -> dict[str, Figures]:
    """Figures by arm; each image goes to every system, in a changing order."""
    figures = {system.arm.name: Figures() for system in systems}
    rng = random.Random(options.seed)
    async with new_session() as session:
        for number in range(options.images):
            size = SIZES[number % len(SIZES)]
            image = new_image(rng, *size)
            order = list(systems)
            rng.shuffle(order)
            for system in order:
                endpoint = Endpoint(system.base_url, system.model, session)
                await turn(
                    endpoint, figures[system.arm.name], image, options.streams, f"{number} {system.arm.name}"
                )
            latest = (f"{name} {each.latencies_ms[-1:]}" for name, each in figures.items())
            print(f"{number + 1}: {size[0]}x{size[1]}", *latest, flush=True)
    return figures


async def turn(
    endpoint: Endpoint,
    figures: Figures,
    image: object,
    num_streams: int,
    name: str,
) -> None:
    """Ask about one image, beside text streams that begin before it and are not waited for."""
    texts = [
        asyncio.create_task(ask(endpoint, text_question(f"{name} {each}"))) for each in range(num_streams)
    ]
    content = [image, text_part("read the digits")]
    question = Question("image", [{"role": "user", "content": content}], 8)
    answer = await ask(endpoint, question)
    note(figures, answer)
    if not answer.error:
        figures.latencies_ms.append(answer.e2e_ms)
    for text in await asyncio.gather(*texts):
        note(figures, text)
        figures.gaps_ms += text.gaps_ms


def text_question(text: str) -> Question:
    messages = [{"role": "user", "content": f"count to 20: {text}"}]
    return Question("text", messages, STREAM_TOKENS)


def note(figures: Figures, answer: Answer) -> None:
    if answer.error:
        print(f"failed: {answer.error}", flush=True)
        figures.failures.append(answer.error)


def report(options: argparse.Namespace, figures: dict[str, Figures], ended: Sequence[str]) -> int:
    one, ours = figures["monolith"], figures["text_first"]
    rows = {
        "image, p50": (one.latencies_ms, ours.latencies_ms, 0.5),
        "image, p99": (one.latencies_ms, ours.latencies_ms, 0.99),
        "gap of text, p50": (one.gaps_ms, ours.gaps_ms, 0.5),
        "gap of text, p99": (one.gaps_ms, ours.gaps_ms, 0.99),
        "gap of text, p99.9": (one.gaps_ms, ours.gaps_ms, 0.999),
    }
    print("| figure | one engine, ms | Triptych, ms | ratio |\n|---|---|---|---|")
    found = {}
    for name, (base, got, part) in rows.items():
        before, after = percentile(base, part), percentile(got, part)
        found[name] = {"monolith_ms": before, "triptych_ms": after, "ratio": after / before}
        if base:
            print(f"| {name} | {before:.0f} | {after:.0f} | {after / before:.2f} |")
    for arm, each in figures.items():
        for failure in each.failures:
            print(f"failed: {arm}: {failure}", file=sys.stderr)
    if ended:
        print(f"ended meanwhile: {', '.join(ended)}", file=sys.stderr)
    if options.json:
        failures = {arm: each.failures for arm, each in figures.items()}
        write_json(options.json, {"loops": options.loops, "figures": found, "failures": failures})
    return 1 if ended or any(each.failures for each in figures.values()) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loops", type=int, default=8, help="other programs that compute without a pause")
    parser.add_argument("--loops-at-start", action="store_true", help="while the engines start, too")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--streams", type=int, default=0, help="answers of text beside each image")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--engine-args", default=DEFAULT_ENGINE_ARGS)
    parser.add_argument("--set", action="append", default=[], help="a setting of Triptych, VARIABLE=VALUE")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
