"""Encoders from zero to a burst and back, on real engines: what it costs texts, and how long images wait.

    ./triptych bench scale_out [--most 3] [--images 20] [--texts 100] [--burst 120] [--json FILE]

One system by `up --encoders 0..MOST`, with the demo model. In turns:

    before   TEXTS texts by four clients, without an encoder and without images
    zero     IMAGES requests with a new image at once and TEXTS texts, still without an encoder
    burst    BURST requests with a large new image at once, until the encoders have grown and gone again
    check    the images of `zero` once more, one by one: the same tokens

The bars, of which none is of the wall alone:

    failures, and answers that differ               0
    text in `zero` / in `before`, 99th percentile   <= 1.2 of the time to the end of an answer
    first answer to an image                        <= the start of its encoder + 2 s
    encoders in `burst`                             MOST, and none in the end

The start of an encoder is what the supervisor shows. Exit status 1 if a bar is missed.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from load.client import Answer, Endpoint, Question, ask, new_session
from load.contents import new_image, text_part
from load.figures import percentile
from load.json_reports import write_json

from triptych_cli.settings import DEFAULT_MODEL
from triptych_cli.supervisor.state import RUNNING, ServiceState, SystemStatus, read_status

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.real.system import System, running_system  # noqa: E402

ANSWER_TOKENS = 16
NUM_TEXT_CLIENTS = 4
SMALL_SIDE, LARGE_SIDE = 224, 1000
LOOK_S = 0.1
LIMITS = (
    "TRIPTYCH_ENCODER_GRACE_S", "TRIPTYCH_FIRST_TOKEN_TIMEOUT_S", "TRIPTYCH_MAX_QUEUE_AGE_S",
    "TRIPTYCH_REQUEST_TIMEOUT_S",
)  # fmt: skip
TEXT_BAR, FIRST_IMAGE_SLACK_S = 1.2, 2.0


@dataclass
class Watch:
    """States of the encoders over time, as the supervisor writes them."""

    status_file: Path
    num_ready: list[tuple[float, int]] = field(default_factory=list)  # monotonic seconds; of each change
    starts: dict[str, list[float]] = field(default_factory=dict)  # seconds from start to readiness, by name
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # of their number
    _since: dict[str, tuple[ServiceState, float]] = field(default_factory=dict)

    async def run(self) -> None:
        """Look at the states for ever."""
        while True:
            status = read_status(self.status_file)
            if status is not None:
                self._note(status, time.monotonic())
            await asyncio.sleep(LOOK_S)

    def _note(self, status: SystemStatus, now: float) -> None:
        encoders = [each for each in status.services if each.stage == "encoder"]
        for each in encoders:
            before = self._since.get(each.name)
            if before is None or before[0] is not each.state:
                if before is not None and before[0] is ServiceState.STARTING and each.state in RUNNING:
                    self.starts.setdefault(each.name, []).append(each.since - before[1])
                self._since[each.name] = each.state, each.since
        ready = sum(each.state in RUNNING for each in encoders)
        if not self.num_ready or self.num_ready[-1][1] != ready:
            self.num_ready.append((now, ready))
            self.changed.set()

    @property
    def ready(self) -> int:
        return self.num_ready[-1][1] if self.num_ready else 0

    @property
    def most(self) -> int:
        return max((number for _, number in self.num_ready), default=0)


def texts(rng: random.Random, number: int) -> list[Question]:
    return [
        Question("text", [{"role": "user", "content": f"say {rng.getrandbits(32)}"}], ANSWER_TOKENS)
        for _ in range(number)
    ]


def images(rng: random.Random, number: int, side: int) -> list[Question]:
    contents = ([new_image(rng, side), text_part("read the digits")] for _ in range(number))
    return [Question("image", [{"role": "user", "content": each}], ANSWER_TOKENS) for each in contents]


async def by_clients(endpoint: Endpoint, questions: Sequence[Question]) -> list[Answer]:
    """Ask them by `NUM_TEXT_CLIENTS` clients, each with one in flight."""
    left = iter(questions)

    async def client() -> list[Answer]:
        return [await ask(endpoint, question) for question in left]

    found = await asyncio.gather(*(client() for _ in range(NUM_TEXT_CLIENTS)))
    return [each for answers in found for each in answers]


async def at_once(endpoint: Endpoint, questions: Sequence[Question]) -> list[Answer]:
    return list(await asyncio.gather(*(ask(endpoint, question) for question in questions)))


@dataclass
class Report:
    """Figures of one run."""

    failures: list[str]
    num_different: int
    text_ms: dict[str, dict[str, float]]  # by part: p50 and p99
    text_ratio: float
    first_image_s: float
    start_s: float
    most: int
    left: int
    burst_s: float
    num_ready: list[tuple[float, int]]
    starts: dict[str, list[float]]

    def missed(self, most: int) -> list[str]:
        """Return the bars that were missed."""
        bars = {
            "failures": not self.failures,
            "answers that differ": not self.num_different,
            "text": self.text_ratio <= TEXT_BAR,
            "first image": self.first_image_s <= self.start_s + FIRST_IMAGE_SLACK_S,
            "burst": self.most == most and self.left == 0,
        }
        return [name for name, is_met in bars.items() if not is_met]


async def measure(system: System, options: argparse.Namespace) -> Report:
    rng = random.Random(options.seed)
    watch = Watch(system.run_dir / "supervisor.json")
    async with new_session(options.patience) as session:
        endpoint = Endpoint(system.base_url, options.model.name, session)
        watching = asyncio.get_running_loop().create_task(watch.run())
        try:
            await by_clients(endpoint, texts(rng, NUM_TEXT_CLIENTS))  # warm
            before = await by_clients(endpoint, texts(rng, options.texts))
            asked_at = time.monotonic()
            asked = images(rng, options.images, SMALL_SIDE)
            pictures, beside = await asyncio.gather(
                at_once(endpoint, asked), by_clients(endpoint, texts(rng, options.texts))
            )
            first_image_s = min((each.end for each in pictures if not each.error), default=0.0) - asked_at
            start_s = max((each for starts in watch.starts.values() for each in starts), default=0.0)
            again = [await ask(endpoint, question) for question in asked]
            burst_at = time.monotonic()
            burst = await at_once(endpoint, images(rng, options.burst, LARGE_SIDE))
            burst_s = time.monotonic() - burst_at
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(options.patience):
                    while watch.ready:
                        watch.changed.clear()
                        await watch.changed.wait()
        finally:
            watching.cancel()
    parts = {"before": before, "zero": beside}
    answers = [*before, *pictures, *beside, *again, *burst]
    times = {name: [each.e2e_ms for each in found] for name, found in parts.items()}
    p99 = {name: percentile(found, 0.99) for name, found in times.items()}
    return Report(
        failures=[each.error for each in answers if each.error],
        num_different=sum(one.token_ids != two.token_ids for one, two in zip(pictures, again, strict=True)),
        text_ms={name: {"p50": percentile(found, 0.5), "p99": p99[name]} for name, found in times.items()},
        text_ratio=p99["zero"] / p99["before"],
        first_image_s=first_image_s,
        start_s=start_s,
        most=watch.most,
        left=watch.ready,
        burst_s=burst_s,
        num_ready=[(round(at - asked_at, 1), number) for at, number in watch.num_ready],
        starts=watch.starts,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--most", type=int, default=3, help="encoders")
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--burst", type=int, default=120)
    parser.add_argument("--cooldown", type=float, default=10.0, help="TRIPTYCH_SCALE_COOLDOWN_S")
    parser.add_argument(
        "--patience", type=float, default=900.0, help="seconds for any answer, and for the end"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended
    options = parse()
    with running_system(
        f"--encoders=0..{options.most}",
        model=options.model,
        TRIPTYCH_SCALE_COOLDOWN_S=str(options.cooldown),
        TRIPTYCH_MAX_REQUESTS_IN_FLIGHT="512",
        **dict.fromkeys(LIMITS, str(options.patience)),  # type: ignore[arg-type]
    ) as system:
        report = asyncio.run(measure(system, options))
    shown = vars(report)
    print(json.dumps(shown, indent=1))
    if options.json is not None:
        write_json(options.json, shown)
    missed = report.missed(options.most)
    print(f"missed: {', '.join(missed)}" if missed else "all bars are met")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
