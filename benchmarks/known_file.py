"""First token of a request with an uploaded file, beside text of as many tokens. Real engines.

    python benchmarks/known_file.py [--repeats 15] [--scale m] [--json FILE]

One system as `up` starts it (one encoder, one prefill_decode, one gateway), with a model of a scale of
`compare`. Each repeat uploads a new image, waits until it is encoded, which no request has asked for, and
asks, one after the other, in an order that changes:

    text        a new text of as many tokens as the prompt with the image has
    file        a new short text, and the file
    data_url    the same with the image itself: sent, decoded and hashed once more

and then, in an order that changes, `text_again` and `file_again`: the file has been asked about before.
Texts stand in front, so that no prefix is in the KV cache. Then the gateway is restarted, and each file is
asked about once more (`file_restarted`), in turn with new texts (`text_restarted`). Ratios are of the first
tokens of one repeat, with 95 % intervals. Bars:

    file ÷ text; file_again ÷ text_again; file_restarted ÷ text_restarted    <= 1.15
    encodes                                                                  one per file

Exit status 1 if a bar is missed, or a request failed.
"""

import argparse
import asyncio
import random
import signal
import sys
from base64 import b64decode
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from comparison.model_folder import model_folder
from comparison.model_shapes import SCALES, Scale
from load.client import Answer, Endpoint, Question, ask, new_session
from load.contents import Part, TextMaker, new_image, text_part
from load.intervals import Interval, ratio_interval
from load.json_reports import write_json

from triptych_cli.settings import DEFAULT_MODEL, CliSettings

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.real.system import System, running_system  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

ENGINE_ARGS = "--dtype=float32 --max-model-len 8192 --max-num-batched-tokens 2048"
SHORT_TOKENS = 12
ANSWER_TOKENS = 4
NUM_WARM_UPS = 3
LIMIT_S = 60.0
BAR = 1.15
PAIRS = (
    ("file", "text"),
    ("file_again", "text_again"),
    ("file_restarted", "text_restarted"),
    ("data_url", "text"),
)
BARRED = 3  # of the pairs; the last is for comparison


@dataclass
class Figures:
    """First tokens in milliseconds by kind, in the order of the repeats."""

    ttft_ms: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    num_tokens: dict[str, list[int]] = field(default_factory=dict)  # of the prompts, as vLLM counts them
    num_files: int = 0
    num_encodes: int = 0

    def add(self, answer: Answer) -> None:
        self.ttft_ms.setdefault(answer.kind, []).append(answer.ttft_ms)
        if answer.error:
            self.failures.append(f"{answer.kind}: {answer.error}")

    def ratio(self, kind: str, base: str) -> Interval:
        return ratio_interval(self.ttft_ms[kind], self.ttft_ms[base])


class Caller:
    """Makes and asks the questions, all new by the seed."""

    def __init__(self, system: System, model: Path, scale: Scale, figures: Figures, seed: int) -> None:
        self.system = system
        self._model = model
        self._scale = scale
        self._figures = figures
        self._rng = random.Random(seed)
        self._texts = TextMaker(model)
        self._text_tokens = 0  # of a text that makes a prompt as long as one with an image

    def image(self) -> Part:
        return new_image(self._rng, self._scale.image_side)

    def upload(self, image: Part) -> Part:
        """Upload an image; returns the part that names the file."""
        content = b64decode(image["image_url"]["url"].partition(",")[2])
        with self.system.openai as client:
            file = client.files.create(file=("image.png", content), purpose="vision")
        self._figures.num_files += 1
        return {"type": "file", "file": {"file_id": file.id}}

    def calibrate(self, part: Part) -> None:
        """Find the length of the texts, from vLLM's count of two prompts."""
        short, other = self._short(), self._short()
        with_part = self._count_tokens([text_part(short), part]) - self._texts.count(short)
        alone = self._count_tokens([text_part(other)]) - self._texts.count(other)
        self._text_tokens = with_part + SHORT_TOKENS - alone
        counted = {"text": self._count_tokens([self._long()])}
        counted["file"] = self._count_tokens([text_part(self._short()), part])
        for kind, num_tokens in counted.items():
            self._figures.num_tokens.setdefault(kind, []).append(num_tokens)

    def question(self, kind: str, part: Part | None = None) -> Question:
        parts = [self._long()] if part is None else [text_part(self._short()), part]
        return Question(kind, [{"role": "user", "content": parts}], ANSWER_TOKENS)

    async def ask_all(self, questions: list[Question], *, is_timed: bool = True) -> None:
        """Ask the questions one after the other, in random order."""
        self._rng.shuffle(questions)
        async with new_session() as session:
            endpoint = Endpoint(self.system.base_url, self._model.name, session)
            for question in questions:
                answer = await ask(endpoint, question)
                if is_timed:
                    self._figures.add(answer)

    def _short(self) -> str:
        return self._exactly(SHORT_TOKENS)

    def _long(self) -> Part:
        return text_part(self._exactly(self._text_tokens))

    def _exactly(self, num_tokens: int) -> str:
        while True:
            text = self._texts.new_text(self._rng, num_tokens)
            if self._texts.count(text) == num_tokens:
                return text

    def _count_tokens(self, parts: list[Part]) -> int:
        with self.system.openai as client:
            completions: Any = client.chat.completions
            messages = [{"role": "user", "content": parts}]
            answer = completions.create(model=self._model.name, messages=messages, max_tokens=1)
        return int(answer.usage.prompt_tokens)


def num_encodes(system: System) -> int:
    return system.store_stats().num_seals_total


async def measure(caller: Caller, figures: Figures, num_repeats: int) -> None:
    system = caller.system
    before = num_encodes(system)

    def uploaded(image: Part) -> Part:
        part = caller.upload(image)
        wanted = before + figures.num_files
        wait_until(lambda: num_encodes(system) >= wanted, LIMIT_S, "the file is encoded")
        wait_until(lambda: system.store_stats().num_pins == 0, LIMIT_S, "its pins have ended")
        return part

    files: list[Part] = []
    for repeat in range(num_repeats + NUM_WARM_UPS):
        image = caller.image()
        part = await asyncio.to_thread(uploaded, image)
        if not repeat:
            await asyncio.to_thread(caller.calibrate, part)
        kinds = [("text", None), ("file", part), ("data_url", image)]
        is_timed = repeat >= NUM_WARM_UPS
        await caller.ask_all([caller.question(*each) for each in kinds], is_timed=is_timed)
        again = [("text_again", None), ("file_again", part)]
        await caller.ask_all([caller.question(*each) for each in again], is_timed=is_timed)
        if is_timed:
            files.append(part)
    await asyncio.to_thread(restart_gateway, system)
    for _ in range(NUM_WARM_UPS):
        await caller.ask_all([caller.question("text")], is_timed=False)
    for part in files:
        await caller.ask_all([caller.question("text_restarted"), caller.question("file_restarted", part)])
    figures.num_encodes = num_encodes(system) - before


def restart_gateway(system: System) -> None:
    done = system.command("restart", "gateway-0")
    if done.returncode:
        raise RuntimeError(f"restart failed:\n{done.stdout}\n{done.stderr}")

    def is_ready() -> bool:
        try:
            url = httpx.URL(system.base_url).join("/health/ready")
            return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(is_ready, LIMIT_S, "the gateway is ready again")


def show(figures: Figures) -> bool:
    """Print the figures; True if all bars hold."""
    for kind, values in figures.ttft_ms.items():
        print(f"{kind:15} {median(values):8.1f} ms to the first token, median of {len(values)}")
    print(f"tokens of the prompts: {figures.num_tokens}")
    held = figures.num_encodes == figures.num_files
    print(f"encodes: {figures.num_encodes} of {figures.num_files} files: {'held' if held else 'missed'}")
    for number, (kind, base) in enumerate(PAIRS):
        ratio = figures.ratio(kind, base)
        verdict = ""
        if number < BARRED:
            is_held = ratio.middle <= BAR
            held = held and is_held
            verdict = f"   bar {BAR}: {'held' if is_held else 'missed'}"
        print(f"{kind} ÷ {base}: {ratio}{verdict}")
    for failure in figures.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return held and not figures.failures


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended
    parser = argparse.ArgumentParser(prog="bench known_file", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--scale", choices=list(SCALES), default="m")
    parser.add_argument("--seed", type=int, default=0, help="of all contents")
    parser.add_argument("--engine-args", default=ENGINE_ARGS, help="of vLLM, for both engines")
    parser.add_argument("--cache", type=Path, default=CliSettings().state_dir / "bench-models")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    scale = SCALES[options.scale]
    model = model_folder(scale, DEFAULT_MODEL, options.cache)
    figures = Figures()
    args = [f"--encoder-args={options.engine_args}", f"--prefill-decode-args={options.engine_args}"]
    with running_system(*args, model=model) as system:
        caller = Caller(system, model, scale, figures, options.seed)
        asyncio.run(measure(caller, figures, options.repeats))
    is_held = show(figures)
    if options.json:
        found = {
            "options": {key: str(value) for key, value in vars(options).items()},
            "ttft_ms": figures.ttft_ms,
            "num_tokens": figures.num_tokens,
            "encodes": [figures.num_encodes, figures.num_files],
            "ratios": {f"{kind}/{base}": vars(figures.ratio(kind, base)) for kind, base in PAIRS},
            "failures": figures.failures,
        }
        write_json(options.json, found)
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
