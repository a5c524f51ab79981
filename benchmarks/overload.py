"""Outcome of far more images at once than encoders can make, and the rate at which they are made.

    python benchmarks/overload.py [--parts large,sizes,mixed,small] [--rounds 3] [--no-monolith]
        [--base-url URL] [--json FILE] [options of up, as --local-encode=auto]

One system as `up` starts it, with the demo model, and one vLLM engine with all cores, in turns:

    large   200 new images of 1000 x 1000 at once
    sizes   60 new images of seven sizes at once
    mixed   300 requests of 60 clients, each with one in flight: texts, known and new images, half of them
            streams that are read to their end
    small   300 new images of 224 x 224 at once: the throughput

A request is answered, or it is refused at once (429), and after its Retry-After it is sent again: a time
that is true lets most of them in. What else comes back is a failure. The bars:

    failures                                               0
    a refusal comes within                                 5 s, at the 99th percentile
    small: system ÷ engine, requests per second            >= 0.95

Exit status 1 if one of them is missed.
"""

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from load.client import Answer, Endpoint, Question, ask, new_session
from load.contents import Part, new_image, text_part
from load.figures import percentile
from load.json_reports import write_json

from triptych_cli.settings import DEFAULT_MODEL

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.real.system import EXACT, running_monolith, running_system  # noqa: E402

ANSWER_TOKENS = 4
TEXT_TOKENS = 16
SIDES = (64, 112, 224, 448, 640, 1000, 1400)
NUM_CLIENTS, REQUESTS_OF_CLIENT = 60, 5
MAX_REFUSAL_S = 5.0
THROUGHPUT_BAR = 0.95
ENGINE_ARGS = "--dtype=float32"
MAX_IN_FLIGHT = "512"  # `small` has 300 at once, and both servers are to answer all of them
MONOLITH = "monolith"


@dataclass
class Figures:
    """Figures of one part at one server."""

    first: list[Answer] = field(default_factory=list)
    again: list[Answer] = field(default_factory=list)  # what was refused, after its Retry-After
    rates: list[float] = field(default_factory=list)  # answered requests a second, of each round

    @property
    def failures(self) -> list[Answer]:
        return [each for each in (*self.first, *self.again) if each.error and each.status != 429]

    @property
    def refused(self) -> list[Answer]:
        return [each for each in self.first if each.status == 429]

    @property
    def refusal_s(self) -> float:
        """Seconds to a refusal, 99th percentile."""
        return percentile([each.end - each.start for each in self.refused], 0.99) if self.refused else 0.0

    def line(self) -> str:
        done = sorted(each.end - each.start for each in self.first if not each.error)
        statuses = Counter(each.status for each in self.first)
        retries = [each.retry_after_s or 0.0 for each in self.refused]
        text = f"{dict(sorted(statuses.items()))}"
        if done:
            text += f", answered in {percentile(done, 0.5):.1f} / {done[-1]:.1f} s (p50 / longest)"
        if retries:
            text += (
                f", refused in {self.refusal_s:.1f} s, Retry-After {min(retries):.0f} to {max(retries):.0f} s"
            )
            text += f"; sent again then: {dict(sorted(Counter(each.status for each in self.again).items()))}"
        return f"{text}; {statistics.median(self.rates):.2f} answers/s"


def _question(content: Sequence[Part], num_tokens: int = ANSWER_TOKENS) -> Question:
    return Question("overload", [{"role": "user", "content": list(content)}], num_tokens)


def _with_image(rng: random.Random, width: int, height: int | None = None) -> Question:
    return _question([new_image(rng, width, height), text_part("what is this?")])


def large(rng: random.Random) -> list[list[Question]]:
    return [[_with_image(rng, 1000)] for _ in range(200)]


def sizes(rng: random.Random) -> list[list[Question]]:
    return [[_with_image(rng, SIDES[number % len(SIDES)])] for number in range(60)]


def small(rng: random.Random) -> list[list[Question]]:
    return [[_with_image(rng, 224)] for _ in range(300)]


def mixed(rng: random.Random) -> list[list[Question]]:
    known = new_image(rng, 224)
    kinds: list[Callable[[], Question]] = [
        lambda: _question([text_part(f"say {rng.getrandbits(32)}")], TEXT_TOKENS),
        lambda: _question([known, text_part(f"what is this, {rng.getrandbits(32)}?")]),
        lambda: _with_image(rng, rng.choice(SIDES)),
        lambda: _question([text_part(f"tell me of {rng.getrandbits(32)}")], 4 * TEXT_TOKENS),
    ]
    numbers = iter(range(NUM_CLIENTS * REQUESTS_OF_CLIENT))
    return [
        [kinds[next(numbers) % len(kinds)]() for _ in range(REQUESTS_OF_CLIENT)] for _ in range(NUM_CLIENTS)
    ]


PARTS = {"large": large, "sizes": sizes, "mixed": mixed, "small": small}


async def _client(
    endpoint: Endpoint, questions: Iterable[Question], figures: Figures, tasks: set[asyncio.Task[None]]
) -> None:
    """Ask one question after the other; refused ones are sent again beside."""
    for question in questions:
        answer = await ask(endpoint, question)
        figures.first.append(answer)
        if answer.status == 429:
            tasks.add(asyncio.ensure_future(_again(endpoint, question, answer, figures)))


async def _again(endpoint: Endpoint, question: Question, refused: Answer, figures: Figures) -> None:
    await asyncio.sleep(refused.retry_after_s or 0.0)
    figures.again.append(await ask(endpoint, question))


async def run_part(base_url: str, model: str, clients: list[list[Question]], figures: Figures) -> None:
    """Run all clients at the same time."""
    tasks: set[asyncio.Task[None]] = set()
    before = len(figures.first), len(figures.again)
    async with new_session() as session:
        endpoint = Endpoint(base_url, model, session)
        await asyncio.gather(*(_client(endpoint, each, figures, tasks) for each in clients))
        await asyncio.gather(*tasks)
    answers = [*figures.first[before[0] :], *figures.again[before[1] :]]
    answers = [each for each in answers if not each.error]
    if answers:
        seconds = max(each.end for each in answers) - min(each.start for each in answers)
        figures.rates.append(len(answers) / seconds)


def measure(
    servers: dict[str, tuple[str, str]], options: argparse.Namespace
) -> dict[str, dict[str, Figures]]:
    """Figures by part and server; `servers` has base URL and model by name."""
    found = {part: {server: Figures() for server in servers} for part in options.parts}
    for base_url, model in servers.values():  # engines are slower at first, and their speed is not known
        warm_up = [
            [_with_image(random.Random(f"{options.seed} warm {n}"), side)] for n, side in enumerate(SIDES)
        ]
        asyncio.run(run_part(base_url, model, warm_up, Figures()))
    for number in range(options.rounds):
        for part in options.parts:
            names = list(servers) if number % 2 == 0 else list(servers)[::-1]
            for name in names:
                clients = PARTS[part](random.Random(f"{options.seed} {part} {number}"))
                asyncio.run(run_part(*servers[name], clients, found[part][name]))
                print(f"{part:6} {name:8} round {number}: {found[part][name].line()}", flush=True)
    return found


def show(found: dict[str, dict[str, Figures]]) -> bool:
    """Print the figures; True if the bars hold."""
    is_held = True
    for part, servers in found.items():
        for name, figures in servers.items():
            print(f"{part:6} {name:8} {figures.line()}")
            if name == MONOLITH:
                continue
            for error, num in Counter(each.error[:200] for each in figures.failures).most_common(5):
                print(f"  failed {num} times: {error}", file=sys.stderr)
            is_held &= not figures.failures and figures.refusal_s <= MAX_REFUSAL_S
        if MONOLITH in servers and len(servers) > 1:
            (own,) = (figures for name, figures in servers.items() if name != MONOLITH)
            pairs = zip(own.rates, servers[MONOLITH].rates, strict=True)
            ratio = statistics.median(rate / base for rate, base in pairs)
            print(f"{part:6} system ÷ engine: {ratio:.2f}")
            is_held &= part != "small" or ratio >= THROUGHPUT_BAR
    return is_held


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended
    parser = argparse.ArgumentParser(prog="bench overload", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of all contents")
    parser.add_argument("--base-url", help="of a system that runs already")
    parser.add_argument("--monolith-url", help="of an engine that runs already")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--no-monolith", action="store_true", help="do not start one vLLM engine beside it")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options, up = parser.parse_known_args()
    name = options.model.name
    if options.base_url:
        servers = {"system": (options.base_url, name)}
        if options.monolith_url:
            servers[MONOLITH] = (options.monolith_url, name)
        found = measure(servers, options)
    else:
        args = (f"--encoder-args={ENGINE_ARGS}", f"--prefill-decode-args={ENGINE_ARGS}", *up)
        with running_system(
            *args, model=options.model, TRIPTYCH_MAX_REQUESTS_IN_FLIGHT=MAX_IN_FLIGHT
        ) as system:
            servers = {"system": (system.base_url, name)}
            if options.no_monolith:
                found = measure(servers, options)
            else:
                with (
                    tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder,
                    running_monolith(Path(folder), *EXACT, model=options.model) as engine,
                ):
                    servers[MONOLITH] = (engine.base_url, name)
                    found = measure(servers, options)
    is_held = show(found)
    if options.json:
        rows = {
            part: {
                name: {
                    "statuses": Counter(each.status for each in figures.first),
                    "again": Counter(each.status for each in figures.again),
                    "seconds": [each.end - each.start for each in figures.first],
                    "retry_after_s": [each.retry_after_s for each in figures.refused],
                    "rates": figures.rates,
                }
                for name, figures in servers.items()
            }
            for part, servers in found.items()
        }
        write_json(options.json, rows)
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
