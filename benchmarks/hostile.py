"""Hostile requests of one key beside the ordinary requests of another.

    ./triptych bench hostile [--rounds 3] [--settle-s 10] [--json FILE]
    ./triptych bench hostile --fuzz-minutes 10 [--seed 1] [--encoders 0] [--large-vocabulary]

One gateway, one encoder and two prefill_decodes serve the demo model. The neighbour asks for a text, a known
image, a new image, a JSON object and one with a schema, one after the other, without a pause. It does so
alone first, then while the attacker sends each of `ATTACKS`, several at once. Reported of each attack:
statuses and longest time of its own requests; how much longer the neighbour's slowest request took than the
slowest of its kind before; the largest growth of a process's memory; the longest stop of a loop of gateway,
prefill_decodes and their EngineCores, in CPU seconds of its thread; how soon everything of its requests was
given back. Then the attacker sends the same again and hangs up after `HANG_UP_S`.

The exit code is 1 if a process ended, if the neighbour got an answer that failed or differs from its answer
alone, if a loop stopped for more than `MAX_STOP_S`, if a place, a request, a pin or a process that
compiles or decodes was still held 10 s behind the attack, or, `--settle-s` behind the last attack, if a
process is still larger by `MAX_LEFT_MIB`.

With `--fuzz-minutes` it sends hostile values in every field of every endpoint instead. With
`--large-vocabulary` the model has 150,000 tokens, which is what grammars and sampling cost most for.
"""

import argparse
import asyncio
import base64
import hashlib
import io
import json
import random
import secrets
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import aiohttp
import av
from load.contents import Part, new_image, text_part
from load.json_reports import write_json
from yarl import URL

from triptych_cli.settings import DEFAULT_MODEL

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hostile_bench.fuzzing import MAX_STOP_S, fuzz_system  # noqa: E402
from hostile_bench.given_back import HeldByRequests  # noqa: E402
from hostile_bench.processes import Growth, loops_of, memory_of  # noqa: E402
from hostile_bench.vocabulary import enlarge_vocabulary  # noqa: E402

from tests.support.hostile.loop_probe import probe_environment, reset_stops  # noqa: E402
from tests.support.real.system import System, running_system  # noqa: E402

CHAT = "/chat/completions"
ENGINE_ARGS = "--dtype=float32"
KINDS = ("text", "known image", "new image", "json", "schema")
TIMEOUT_S = 300.0
SAMPLE_S = 0.25
HANG_UP_S = 1.0
NUM_IDLE = 1000
Body = Mapping[str, Any]


@dataclass(frozen=True)
class Attack:
    """Requests sent at once, `num_at_once` of each body."""

    name: str
    bodies: Sequence[tuple[str, Body]]  # path, body
    num_at_once: int = 4
    num_idle: int = 0  # connections without a request beside them


@dataclass
class Outcome:
    """Figures of one attack on the system."""

    statuses: Counter[int] = field(default_factory=Counter)
    longest_s: float = 0.0
    neighbour_late_s: float = 0.0
    neighbour_faults: list[str] = field(default_factory=list)
    grown_mib: float = 0.0
    grown_process: str = ""
    stop_cpu_s: float = 0.0  # longest of a loop
    given_back_s: float = 0.0
    faults: list[str] = field(default_factory=list)  # of the system, not of the neighbour's answers


def _chat(content: Sequence[Part] | str = "read the digits", **fields: Any) -> tuple[str, Body]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    return CHAT, {**body, **fields}


def _schema(schema: Body) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def _properties(number: int) -> Body:
    """Schema of optional properties, for which xgrammar takes quadratic time."""
    return {"type": "object", "properties": {f"field_{n}": {"type": "string"} for n in range(number)}}


RECORD: Body = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "day": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
        "parts": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    },
    "required": ["name", "day", "parts"],
    "additionalProperties": False,
}


def _costly_grammars(number: int) -> list[tuple[str, Body]]:
    """Grammars that cost much with each token, behind a beginning that compile processes seldom meet.

    A `logit_bias` would make any model begin so; one that counts does so by itself.
    """
    repeated = "|".join(f".{{1,{500 + each}}}{each}" for each in range(8))
    kinds: list[dict[str, Any]] = [
        {"grammar": "root ::= [^0-9] [^#]* | [0-9] r\nr ::= r r | [a-z0-9 ]"},
        {"grammar": "root ::= [^0-9] [^#]* | [0-9] s\ns ::= [a-z0-9 ] s [a-z0-9 ] | [0-9]"},
        {"grammar": 'root ::= [^0-9] [^#]* | [0-9] r\nr ::= r r | r r r | [0-9] | " "'},
        {"json": {"type": "string", "pattern": f"^([^0-9].*|[0-9]({repeated}))$"}},
    ]
    bodies = []
    for each in range(number):
        kind = kinds[each % len(kinds)]
        if "grammar" in kind:
            kind = {"grammar": f"# {each}\n{kind['grammar']}"}
        else:
            kind = {"json": {**kind["json"], "title": f"{each}"}}
        bodies.append(_chat("count from one", max_tokens=1_000, structured_outputs=kind))
    return bodies


def _jpeg_2000_video(num_frames: int = 40, size: int = 128) -> Part:
    """AVI of noise in JPEG 2000, which takes long to decode."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream = container.add_stream("jpeg2000", rate=10)
        stream.width, stream.height, stream.pix_fmt = size, size, "rgb24"
        frame = av.VideoFrame(size, size, "rgb24")
        frame.planes[0].update(random.Random(1).randbytes(frame.planes[0].buffer_size))
        data = b"".join(bytes(each) for each in (*stream.encode(frame), *stream.encode()))
        for number in range(num_frames):
            packet = av.Packet(data)
            packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, 10), True
            packet.pts = packet.dts = number
            container.mux(packet)
    url = "data:video/x-msvideo;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def attacks() -> list[Attack]:
    """Return what has ended, stalled or filled an engine before it was bounded."""
    nested = "(" * 50_000 + "a" + ")" * 50_000
    slow = {**_properties(60), "additionalProperties": False}
    return [
        Attack("nested pattern", [_chat(**_schema({"type": "string", "pattern": nested}))]),
        Attack("long logit_bias key", [_chat(logit_bias={"1/" * 7_000: 1})]),
        Attack("regex of 368 kB", [_chat(structured_outputs={"regex": "input_value={'error': {" * 16_000})]),
        Attack("responses of junk", [("/responses", {"input": [{"type": [{}] * 50}] * 3_000})]),
        Attack(
            "padding by the template",
            [_chat(chat_template_kwargs={"padding": "max_length", "max_length": 10**8, "tokenize": True})],
        ),
        Attack("many token ids", [_chat(allowed_token_ids=list(range(1_025)) * 2)]),
        Attack("slow schemas", [_chat(**_schema({**slow, "title": f"{n}"})) for n in range(4)]),
        Attack("endless schema", [_chat(**_schema(_properties(1_500)))]),
        Attack("nested repetitions", [_chat(structured_outputs={"regex": "((a{1,200}){1,200}){1,200}"})]),
        Attack("JPEG 2000 video", [_chat([_jpeg_2000_video(), text_part("what is this?")])], 8),
        Attack("128 choices", [_chat(n=128, max_tokens=4_000)]),
        Attack("any character", [_chat(n=128, **_schema({"type": "string", "pattern": "^.{1,500}$"}))]),
        Attack("16 costly grammars", _costly_grammars(16), 1),
        Attack("nested stars", [_chat(n=16, max_tokens=2_000, structured_outputs={"regex": "((.*)*)*"})]),
        Attack(
            "log probabilities of 16 prompts",
            [("/completions", {"prompt": ["a b c d " * 400] * 16, "prompt_logprobs": 20, "max_tokens": 1})],
        ),
        Attack("logprob_token_ids", [_chat(logprobs=True, logprob_token_ids=[1, 2, 3])]),
        Attack("broken JSON", [(CHAT, {"messages": "x" * (1 << 20)})], 16),
        Attack("idle connections", [_chat(max_tokens=200)], num_idle=NUM_IDLE),
    ]


class Caller:
    """Client that uses one API key."""

    def __init__(self, base_url: str, session: aiohttp.ClientSession, key: str) -> None:
        self._base_url, self._session = base_url, session
        self._headers = {"Authorization": f"Bearer {key}"}

    async def post(self, path: str, body: Body, hang_up_s: float | None = None) -> tuple[int, bytes, float]:
        """Send one request. Returns status (0: no answer, or hung up), body and seconds."""
        started = time.monotonic()
        try:
            async with (
                asyncio.timeout(hang_up_s),
                self._session.post(
                    self._base_url + path, json={"model": DEFAULT_MODEL.name, **body}, headers=self._headers
                ) as response,
            ):
                return response.status, await response.read(), time.monotonic() - started
        except (aiohttp.ClientError, TimeoutError) as error:
            return 0, repr(error).encode(), time.monotonic() - started


class Neighbour:
    """Asks the same questions repeatedly, except for the image that is new each time."""

    def __init__(self, caller: Caller, seed: int) -> None:
        self._caller, self._rng = caller, random.Random(seed)
        self._known = new_image(self._rng, 224)
        self._alone: dict[str, str] = {}
        self.slowest_s: dict[str, float] = dict.fromkeys(KINDS, 0.0)  # alone

    async def ask(self, kind: str) -> tuple[str, float]:
        """Send a request of `kind`. Returns what is wrong with the answer, or nothing, and its seconds."""
        _, body = {
            "text": lambda: _chat("count from one", max_tokens=16),
            "known image": lambda: _chat([self._known, text_part("what is this?")]),
            "new image": lambda: _chat([new_image(self._rng, 224), text_part("what is this?")]),
            "json": lambda: _chat("an object", response_format={"type": "json_object"}),
            "schema": lambda: _chat("a record", max_tokens=32, **_schema(RECORD)),
        }[kind]()
        status, content, seconds = await self._caller.post(CHAT, body)
        if status != 200:
            return f"{kind}: {status} {content[:200]!r}", seconds
        text = json.loads(content)["choices"][0]["message"]["content"]
        if kind != "new image" and text != self._alone.setdefault(kind, text):
            return f"{kind}: {text!r}, alone {self._alone[kind]!r}", seconds
        return "", seconds


@asynccontextmanager
async def idle_connections(base_url: str, number: int) -> AsyncIterator[None]:
    """Connections of a caller without a key, on which nothing is sent."""
    url, loop = URL(base_url), asyncio.get_running_loop()
    with ExitStack() as stack:
        for _ in range(number):
            each = stack.enter_context(socket.socket())
            each.setblocking(False)
            await loop.sock_connect(each, (url.host, url.port))
        yield


@dataclass(frozen=True)
class Bench:
    """System, neighbour and probes that all attacks of a run share."""

    system: System
    probed: Path
    attacker: Caller
    neighbour: Neighbour
    held: HeldByRequests
    growth: Growth


async def run_attack(attack: Attack, bench: Bench, hang_up_s: float | None = None) -> Outcome:
    """Send the attack, and the neighbour's requests until it is over, and once more."""
    await reset_stops(bench.probed)
    async with idle_connections(bench.system.base_url, attack.num_idle):
        outcome = await _send_attack(attack, bench, hang_up_s)
    outcome.given_back_s, held = await bench.held.wait_given_back()
    if held:
        outcome.faults.append(f"{held} is held {outcome.given_back_s:.0f} s behind the attack")
    for name, stops in loops_of(bench.system, bench.probed).items():
        outcome.stop_cpu_s = max(outcome.stop_cpu_s, stops.longest_cpu_s)
        if stops.longest_cpu_s > MAX_STOP_S:
            longest = max(stops.stops, key=lambda each: each["cpu_s"])
            stack = "\n  ".join(longest["stack"])
            outcome.faults.append(f"{name} stopped for {stops.longest_cpu_s:.3f} s of CPU\n  {stack}")
    return outcome


async def _send_attack(attack: Attack, bench: Bench, hang_up_s: float | None) -> Outcome:
    outcome, neighbour, growth = Outcome(), bench.neighbour, bench.growth
    sent = asyncio.gather(
        *(
            bench.attacker.post(path, body, hang_up_s)
            for path, body in attack.bodies
            for _ in range(attack.num_at_once)
        )
    )

    async def watch() -> None:
        while True:
            for pid, each in memory_of(bench.system).items():
                known = growth.before.get(pid)
                grown = 0.0 if known is None else (each.num_bytes - known.num_bytes) / 2**20
                if grown > outcome.grown_mib:
                    outcome.grown_mib, outcome.grown_process = grown, each.service
            await asyncio.sleep(SAMPLE_S)

    watching = asyncio.ensure_future(watch())
    is_last = False
    while not is_last:
        is_last = sent.done()
        for kind in KINDS:
            fault, seconds = await neighbour.ask(kind)
            outcome.neighbour_late_s = max(outcome.neighbour_late_s, seconds - neighbour.slowest_s[kind])
            if fault:
                outcome.neighbour_faults.append(fault)
    watching.cancel()
    for status, _, seconds in await sent:
        outcome.statuses[status] += 1
        outcome.longest_s = max(outcome.longest_s, seconds)
    return outcome


async def measure(
    system: System, probed: Path, keys: Sequence[str], rounds: int, settle_s: float
) -> tuple[list[tuple[str, Outcome]], list[str]]:
    """Return the outcomes by attack, and what else is wrong."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        attacker, neighbour = (
            Caller(system.base_url, session, keys[0]),
            Neighbour(Caller(system.base_url, session, keys[1]), 1),
        )
        for number in range(8):
            for kind in KINDS:
                fault, seconds = await neighbour.ask(kind)
                if fault:
                    raise RuntimeError(f"the neighbour is not served alone: {fault}")
                if number > 1:  # the first ones warm up
                    neighbour.slowest_s[kind] = max(neighbour.slowest_s[kind], seconds)
        held = HeldByRequests(system, session)
        bench = Bench(system, probed, attacker, neighbour, held, Growth.of(system))
        found = []
        for number in range(rounds):
            for attack in attacks():
                for hang_up_s, name in ((None, attack.name), (HANG_UP_S, f"{attack.name}, hung up")):
                    outcome = await run_attack(attack, bench, hang_up_s)
                    found.append((name, outcome))
                    print(f"round {number} {line(name, outcome)}", flush=True)
        await asyncio.sleep(settle_s)
    return found, bench.growth.faults(system)


def line(name: str, outcome: Outcome) -> str:
    """Return the outcome as one line of a report."""
    return (
        f"{name:32} {dict(sorted(outcome.statuses.items()))} in {outcome.longest_s:.1f} s; neighbour: "
        f"{len(outcome.neighbour_faults)} faults, {max(outcome.neighbour_late_s, 0):.2f} s later; "
        f"+{outcome.grown_mib:.0f} MiB {outcome.grown_process}; loops: {outcome.stop_cpu_s:.3f} s; "
        f"given back in {outcome.given_back_s:.1f} s"
    )


def _write_keys(folder: Path) -> tuple[Path, list[str]]:
    keys = [secrets.token_hex(32) for _ in range(2)]
    file = folder / "keys.toml"
    file.touch(mode=0o600)
    file.write_text(
        "".join(
            f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n'
            f'tenant = "{name}"\n'
            for name, key in zip(("attacker", "neighbour"), keys, strict=True)
        )
    )
    return file, keys


def _fuzz(system: System, probed: Path, key: str, options: argparse.Namespace) -> int:
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    print(f"--seed {seed}", flush=True)
    figures, faults = asyncio.run(
        fuzz_system(system, probed, key, minutes=options.fuzz_minutes, seed=seed, settle_s=options.settle_s)
    )
    print(json.dumps(figures, indent=1))
    for fault in faults:
        print(fault, file=sys.stderr)
    if options.json:
        write_json(options.json, {"faults": faults, **figures})
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench hostile", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle-s", type=float, default=10.0, help="seconds behind the last attack")
    parser.add_argument(
        "--encoders", type=int, choices=(0, 1), default=1, help="0: prefill_decodes encode images themselves"
    )
    parser.add_argument("--large-vocabulary", action="store_true", help="150,000 tokens instead of 1,000")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--fuzz-minutes", type=float, help="send hostile values in every field instead")
    parser.add_argument("--seed", type=int, help="of --fuzz-minutes; without it a new one, which is printed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        file, keys = _write_keys(Path(folder))
        args = (
            "--prefill-decodes=2",
            *(() if options.encoders else ("--encoders=0", "--local-encode=fallback")),
            f"--encoder-args={ENGINE_ARGS}",
            f"--prefill-decode-args={ENGINE_ARGS}",
        )
        env: Any = {"TRIPTYCH_API_KEYS_FILE": str(file), **probe_environment(Path(folder))}
        model = DEFAULT_MODEL
        if options.large_vocabulary:
            model = enlarge_vocabulary(model, Path(folder) / model.name)
        with running_system(*args, model=model, **env) as system:
            if options.fuzz_minutes is not None:
                return _fuzz(system, Path(folder), keys[0], options)
            found, faults = asyncio.run(measure(system, Path(folder), keys, options.rounds, options.settle_s))
    for name, outcome in found:
        faults += [f"beside {name}: {fault}" for fault in (*outcome.neighbour_faults, *outcome.faults)]
    for fault in faults:
        print(fault, file=sys.stderr)
    if options.json:
        write_json(options.json, {"faults": faults, "attacks": [(name, vars(each)) for name, each in found]})
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
