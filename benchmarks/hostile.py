"""Hostile requests of one key beside the ordinary requests of another.

    ./triptych bench hostile [--rounds 3] [--settle-s 10] [--json FILE]

One gateway, one encoder and two prefill_decodes serve the demo model. The neighbour asks for a text, a known
image, a new image and a JSON object, one after the other, without a pause. It does so alone first, then while
the attacker sends each of `ATTACKS`, several at once. Reported of each attack: statuses and longest time of
its own requests; how much longer the neighbour's slowest request took than the slowest of its kind before;
the largest growth of a process's memory. The exit code is 1 if a process ended, if the neighbour got an
answer that failed or differs from its answer alone, or, `--settle-s` behind the last attack, if a process is
still larger by `MAX_LEFT_MIB`.
"""

import argparse
import asyncio
import base64
import hashlib
import io
import json
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import aiohttp
import av
import psutil
from load.contents import Part, new_image, text_part
from load.json_reports import write_json

from triptych_cli.settings import DEFAULT_MODEL

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hostile_bench.fuzzing import fuzz_system  # noqa: E402

from tests.support.hostile.loop_probe import probe_environment  # noqa: E402
from tests.support.real.system import System, running_system  # noqa: E402

CHAT = "/chat/completions"
ENGINE_ARGS = "--dtype=float32"
KINDS = ("text", "known image", "new image", "json")
TIMEOUT_S = 300.0
SAMPLE_S = 0.25
MAX_LEFT_MIB = 256
Body = Mapping[str, Any]


@dataclass(frozen=True)
class Attack:
    """Requests that are sent at once, `num_at_once` of each body."""

    name: str
    bodies: Sequence[tuple[str, Body]]  # path, body
    num_at_once: int = 4


@dataclass
class Outcome:
    """Figures of one attack."""

    statuses: Counter[int] = field(default_factory=Counter)
    longest_s: float = 0.0
    neighbour_late_s: float = 0.0
    neighbour_faults: list[str] = field(default_factory=list)
    grown_mib: float = 0.0
    grown_process: str = ""


def _chat(content: Sequence[Part] | str = "read the digits", **fields: Any) -> tuple[str, Body]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    return CHAT, {**body, **fields}


def _schema(schema: Body) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def _properties(number: int) -> Body:
    """A schema of optional properties: xgrammar takes quadratic time for it."""
    return {"type": "object", "properties": {f"field_{n}": {"type": "string"} for n in range(number)}}


def _jpeg_2000_video(num_frames: int = 40, size: int = 128) -> Part:
    """Return an AVI of noise in JPEG 2000, which takes long to decode."""
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
        Attack(
            "log probabilities of 16 prompts",
            [("/completions", {"prompt": ["a b c d " * 400] * 16, "prompt_logprobs": 20, "max_tokens": 1})],
        ),
        Attack("logprob_token_ids", [_chat(logprobs=True, logprob_token_ids=[1, 2, 3])]),
        Attack("broken JSON", [(CHAT, {"messages": "x" * (1 << 20)})], 16),
    ]


class Caller:
    """Requests of one API key."""

    def __init__(self, base_url: str, session: aiohttp.ClientSession, key: str) -> None:
        self._base_url, self._session = base_url, session
        self._headers = {"Authorization": f"Bearer {key}"}

    async def post(self, path: str, body: Body) -> tuple[int, bytes, float]:
        """Send one request. Returns status (0: no answer), body and seconds."""
        started = time.monotonic()
        try:
            async with self._session.post(
                self._base_url + path, json={"model": DEFAULT_MODEL.name, **body}, headers=self._headers
            ) as response:
                return response.status, await response.read(), time.monotonic() - started
        except (aiohttp.ClientError, TimeoutError) as error:
            return 0, repr(error).encode(), time.monotonic() - started


class Neighbour:
    """Asks the same questions again and again, but for the image that is new each time."""

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
        }[kind]()
        status, content, seconds = await self._caller.post(CHAT, body)
        if status != 200:
            return f"{kind}: {status} {content[:200]!r}", seconds
        text = json.loads(content)["choices"][0]["message"]["content"]
        if kind != "new image" and text != self._alone.setdefault(kind, text):
            return f"{kind}: {text!r}, alone {self._alone[kind]!r}", seconds
        return "", seconds


def _memory(system: System) -> dict[int, tuple[str, int]]:
    """Name and resident bytes of each process of the system."""
    found = {}
    for name, service in system.services().items():
        try:
            host = psutil.Process(service["pid"])
            for process in (host, *host.children(recursive=True)):
                found[process.pid] = (name, process.memory_info().rss)
        except (psutil.Error, TypeError):
            continue
    return found


async def run_attack(
    attack: Attack, attacker: Caller, neighbour: Neighbour, system: System, before: Mapping[int, int]
) -> Outcome:
    """Send the attack, and the neighbour's requests until it is over, and once more."""
    outcome = Outcome()
    requests = [
        asyncio.ensure_future(attacker.post(path, body))
        for path, body in attack.bodies
        for _ in range(attack.num_at_once)
    ]
    sent = asyncio.gather(*requests)

    async def watch() -> None:
        while True:
            for pid, (name, size) in _memory(system).items():
                grown = (size - before[pid]) / 2**20 if pid in before else 0.0
                if grown > outcome.grown_mib:
                    outcome.grown_mib, outcome.grown_process = grown, name
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
    system: System, keys: Sequence[str], rounds: int, settle_s: float
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
        processes = {name: each["pid"] for name, each in system.services().items()}
        before = {pid: size for pid, (_, size) in _memory(system).items()}
        found = []
        for number in range(rounds):
            for attack in attacks():
                outcome = await run_attack(attack, attacker, neighbour, system, before)
                found.append((attack.name, outcome))
                print(f"round {number} {line(attack.name, outcome)}", flush=True)
        await asyncio.sleep(settle_s)
    after = _memory(system)
    faults = [
        f"{name} has another process than before"
        for name, each in system.services().items()
        if each["pid"] != processes[name]
    ]
    for pid, size in before.items():
        if pid not in after:
            faults.append(f"process {pid} has ended")
        elif (left := (after[pid][1] - size) >> 20) > MAX_LEFT_MIB:
            faults.append(f"a process of {after[pid][0]} has kept {left} MiB")
    return found, faults


def line(name: str, outcome: Outcome) -> str:
    """Return the outcome as one line of a report."""
    return (
        f"{name:32} {dict(sorted(outcome.statuses.items()))} in {outcome.longest_s:.1f} s; neighbour: "
        f"{len(outcome.neighbour_faults)} faults, {max(outcome.neighbour_late_s, 0):.2f} s later; "
        f"+{outcome.grown_mib:.0f} MiB {outcome.grown_process}"
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
    parser.add_argument("--encoders", type=int, default=1, help="0: of --fuzz-minutes alone")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--fuzz-minutes", type=float, help="send hostile values in every field instead")
    parser.add_argument("--seed", type=int, help="of --fuzz-minutes; without it a new one, which is printed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        file, keys = _write_keys(Path(folder))
        args = (
            "--prefill-decodes=2",
            f"--encoders={options.encoders}",
            f"--encoder-args={ENGINE_ARGS}",
            f"--prefill-decode-args={ENGINE_ARGS}",
        )
        env: Any = {"TRIPTYCH_API_KEYS_FILE": str(file), **probe_environment(Path(folder))}
        with running_system(*args, model=DEFAULT_MODEL, **env) as system:
            if options.fuzz_minutes is not None:
                return _fuzz(system, Path(folder), keys[0], options)
            found, faults = asyncio.run(measure(system, keys, options.rounds, options.settle_s))
    for name, outcome in found:
        faults += [f"beside {name}: {fault}" for fault in outcome.neighbour_faults]
    for fault in faults:
        print(fault, file=sys.stderr)
    if options.json:
        write_json(options.json, {"faults": faults, "attacks": [(name, vars(each)) for name, each in found]})
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
