"""Cost of one API key's flood of images to another key that asks one image a second. Real engines.

    python benchmarks/fairness.py [--seconds 40] [--rounds 2] [--clients 16] [--scale m]
        [--core-policy text_first] [--json FILE]

One system as `up` starts it (one encoder, one prefill_decode, one gateway), with two API keys and a model of
a scale of `compare`. Every image is new. Each round has two parts of `--seconds` each, of which the first
fifth does not count:

    alone     the second key asks one question with one image a second, and nothing else happens
    flooded   the same, while the first key keeps `--clients` requests with `--images` images each in flight

Figures are of the second key's first tokens, over all rounds. The bar:

    90th percentile flooded ÷ alone    <= 2

Exit status 1 if the bar is missed, or a request of the second key failed. A flood that is refused in part
(429) is counted and goes on.
"""

import argparse
import asyncio
import hashlib
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from comparison.model_folder import model_folder
from comparison.model_shapes import SCALES, Scale
from load.client import Answer, Endpoint, Question, ask, new_session
from load.contents import Part, new_image, text_part
from load.figures import percentile
from load.json_reports import write_json
from serving.stage_times import spans_between

from triptych_cli.settings import DEFAULT_MODEL, CliSettings
from triptych_common.cores.plan import CORE_POLICIES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.real.system import running_system  # noqa: E402

ENGINE_ARGS = "--dtype=float32 --max-model-len 8192 --max-num-batched-tokens 2048"
ANSWER_TOKENS = 4
BAR = 2.0
WARM_UP_PART = 0.2
FLOOD, SECOND = "flood", "second"  # keys, and their names
REFUSED_PAUSE_S = 0.5
MADE_PER_S = 8  # images for the flood: more than are encoded
KEY_NAME = "triptych.api_key_name"  # of a request's span
PARTS = ("alone", "flooded")


@dataclass
class Figures:
    """First tokens of the second key in milliseconds by part, and the outcome of the flood."""

    ttft_ms: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    times_ns: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {part: [] for part in PARTS})
    failures: list[str] = field(default_factory=list)
    num_flood: int = 0
    num_flood_refused: int = 0

    def p(self, part: str, percent: float) -> float:
        return percentile(self.ttft_ms[part], percent / 100)

    @property
    def ratio(self) -> float:
        """Ratio of the 90th percentiles."""
        return self.p("flooded", 90) / self.p("alone", 90)


def show_stages(traces_dir: Path, figures: Figures) -> None:
    """Print the stages of the second key's requests, from the spans of their traces."""
    for part in PARTS:
        spans = [
            each for start, end in figures.times_ns[part] for each in spans_between(traces_dir, start, end)
        ]
        traces = {each.trace_id for each in spans if each.attributes.get(KEY_NAME) == SECOND}
        durations: defaultdict[str, list[float]] = defaultdict(list)
        for each in spans:
            if each.trace_id in traces:
                durations[each.name].append(each.duration_ms)
        print(f"{part}, ms: p50 / p90 of the spans of {len(traces)} requests")
        for name, found in durations.items():
            print(
                f"  {name:40} {percentile(found, 0.5):8.1f} / {percentile(found, 0.9):8.1f} of {len(found)}"
            )


class Caller:
    """Client with one key; every question has new images, by the seed.

    They are made in advance: making one takes as long as the gateway's part of a request, on the measured
    cores.
    """

    def __init__(self, base_url: str, model: Path, scale: Scale, key: str, seed: int) -> None:
        self._url, self._model, self._scale = base_url, model, scale
        self._key = key
        self._rng = random.Random(f"{seed} {key}")
        self._images: list[Part] = []
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Caller":
        self._session = new_session()
        self._session.headers["Authorization"] = f"Bearer {self._key}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    def make(self, num_images: int) -> None:
        """Make images until `num_images` are ready."""
        while len(self._images) < num_images:
            self._images.append(new_image(self._rng, self._scale.image_side))

    async def ask(self, num_images: int) -> Answer:
        if self._session is None:
            raise RuntimeError("not entered")
        self.make(num_images)  # if they were too few
        images = [self._images.pop() for _ in range(num_images)]
        content = [*images, text_part("what is this?")]
        question = Question(self._key, [{"role": "user", "content": content}], ANSWER_TOKENS)
        return await ask(Endpoint(self._url, self._model.name, self._session), question)


async def one_a_second(caller: Caller, figures: Figures, part: str, seconds: float) -> None:
    """Ask once a second, regardless of earlier answers."""
    loop = asyncio.get_running_loop()
    start, start_ns = loop.time(), time.time_ns()

    async def asked(number: int) -> None:
        await asyncio.sleep(max(0.0, start + number - loop.time()))
        answer = await caller.ask(1)
        if answer.error:
            figures.failures.append(f"{part}: {answer.error}")
        elif number >= WARM_UP_PART * seconds:
            figures.ttft_ms[part].append(answer.ttft_ms)

    await asyncio.gather(*(asked(number) for number in range(int(seconds))))
    figures.times_ns[part].append((start_ns, time.time_ns()))


async def flood(caller: Caller, figures: Figures, num_images: int) -> None:
    """Run one client of the flood, without end."""
    while True:
        answer = await caller.ask(num_images)
        figures.num_flood += 1
        if answer.error:
            figures.num_flood_refused += 1
            await asyncio.sleep(REFUSED_PAUSE_S)


async def measure(flooding: Caller, second: Caller, figures: Figures, options: argparse.Namespace) -> None:
    async with flooding, second:
        for _ in range(options.rounds):
            second.make(2 * int(options.seconds))
            flooding.make(options.images * (options.clients + int(MADE_PER_S * options.seconds)))
            await one_a_second(second, figures, "alone", options.seconds)
            clients = [
                asyncio.ensure_future(flood(flooding, figures, options.images))
                for _ in range(options.clients)
            ]
            try:
                await one_a_second(second, figures, "flooded", options.seconds)
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)


def write_keys(folder: Path) -> Path:
    path = folder / "keys.toml"
    digests = {key: hashlib.sha256(key.encode()).hexdigest() for key in (FLOOD, SECOND)}
    path.write_text(
        "".join(f'[[keys]]\nname = "{key}"\nsha256 = "{each}"\n' for key, each in digests.items())
    )
    path.chmod(0o600)
    return path


def show(figures: Figures) -> bool:
    """Print the figures; True if the bar holds."""
    for part in PARTS:
        values = figures.ttft_ms[part]
        print(
            f"{part:8} {figures.p(part, 50):8.1f} / {figures.p(part, 90):8.1f} ms, p50 / p90 of {len(values)}"
        )
    print(f"flood: {figures.num_flood} requests ended, {figures.num_flood_refused} of them refused or failed")
    is_held = figures.ratio <= BAR
    print(f"p90 flooded ÷ alone: {figures.ratio:.2f}   bar {BAR}: {'held' if is_held else 'missed'}")
    for failure in figures.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return is_held and not figures.failures


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended
    parser = argparse.ArgumentParser(prog="bench fairness", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="of each part of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--clients", type=int, default=16, help="of the flood; each has one request in flight"
    )
    parser.add_argument("--images", type=int, default=1, help="of each request of the flood")
    parser.add_argument("--scale", choices=list(SCALES), default="m")
    parser.add_argument("--core-policy", choices=CORE_POLICIES, default="text_first")
    parser.add_argument("--seed", type=int, default=0, help="of all contents")
    parser.add_argument("--engine-args", default=ENGINE_ARGS, help="of vLLM, for both engines")
    parser.add_argument("--cache", type=Path, default=CliSettings().state_dir / "bench-models")
    parser.add_argument("--stages", action="store_true", help="what the second key's requests waited for")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    scale = SCALES[options.scale]
    model = model_folder(scale, DEFAULT_MODEL, options.cache)
    figures = Figures()
    args = [
        f"--encoder-args={options.engine_args}",
        f"--prefill-decode-args={options.engine_args}",
        f"--core-policy={options.core_policy}",
    ]
    with tempfile.TemporaryDirectory(prefix="triptych-keys-") as folder:
        keys = str(write_keys(Path(folder)))
        with running_system(*args, model=model, TRIPTYCH_API_KEYS_FILE=keys) as system:
            flooding, second = (
                Caller(system.base_url, model, scale, key, options.seed) for key in (FLOOD, SECOND)
            )
            asyncio.run(measure(flooding, second, figures, options))
            if options.stages:
                show_stages(system.traces_dir, figures)
    is_held = show(figures)
    if options.json:
        found = {
            "options": {key: str(value) for key, value in vars(options).items()},
            "ttft_ms": figures.ttft_ms,
            "ratio": figures.ratio,
            "flood": [figures.num_flood, figures.num_flood_refused],
            "failures": figures.failures,
        }
        write_json(options.json, found)
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
