"""Cost of the control plane for each request, from 1 to 64 encoders and prefill_decodes.

    python benchmarks/control_plane.py [--instances 1 4 16 64] [--rounds 3] [--json FILE]

Real: Redis, the cache_store, one gateway, and the encoders' and prefill_decodes' sides of the protocol, each
instance a process. Stood in for: vLLM, which answers at once (`tests/support/fast`). All systems are up and
take turns. Of each turn the cost of the same time without requests is taken off, which is a figure of
its own. CPU is that of the processes, so a busy machine changes it little; latency it does change.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import redis

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # for tests.support

from tests.conftest import embedded_redis  # noqa: E402
from tests.support.fast.client import Question  # noqa: E402
from tests.support.fast.layout import Layout  # noqa: E402
from tests.support.fast.processes.tensors import png  # noqa: E402
from tests.support.fast.redis_inspection import RedisServer  # noqa: E402
from tests.support.fast.system import FastSystem  # noqa: E402
from tests.support.protocol_steps import Party  # noqa: E402

SIDE = 6  # pixels: a picture of 36 rows
STREAM_TOKENS = 120
LIMIT_S = 60.0
BACKGROUND = {
    "client", "eval", "exec", "expire", "get", "mget", "multi", "ping", "set", "xclaim", "xpending", "zadd",
    "zrange", "zrangebyscore",
}  # fmt: skip
"""Commands of heartbeats, registry reads and idle readers, which load can delay but not multiply."""

KINDS = ("text", "stream", "new image", "four new images", "known image")


@dataclass(frozen=True)
class Reading:
    """Counters of one system at one moment."""

    at_s: float
    gateway_cpu_s: float
    redis_cpu_s: float
    store_cpu_s: float
    redis_bytes: int  # in and out
    calls: Counter[str]  # of Redis' commands, by name; those inside scripts too

    def since(self, before: "Reading") -> "Reading":
        calls = Counter({name: count - before.calls[name] for name, count in self.calls.items()})
        numbers = {name: getattr(self, name) - getattr(before, name) for name in NUMBERS}
        return Reading(**numbers, calls=calls)

    @property
    def redis_commands(self) -> int:
        return self.calls.total()


NUMBERS = ("at_s", "gateway_cpu_s", "redis_cpu_s", "store_cpu_s", "redis_bytes")


@dataclass
class Row:
    """Values of all rounds for one number of instances and one kind of request."""

    num_instances: int
    kind: str
    gateway_cpu_ms: list[float] = field(default_factory=list)
    redis_cpu_ms: list[float] = field(default_factory=list)
    store_cpu_ms: list[float] = field(default_factory=list)
    redis_commands: list[float] = field(default_factory=list)
    redis_bytes: list[float] = field(default_factory=list)
    latency_ms: list[float] = field(default_factory=list)
    calls: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # each request's, all rounds

    @property
    def own_commands(self) -> float:
        """Redis commands of one request without the background; a script and its commands count."""
        own = sum(count for name, count in self.calls.items() if name not in BACKGROUND)
        return own / max(1, len(self.redis_commands))

    @property
    def own_trips(self) -> float:
        """Round trips of one request: scripts and stream reads, for which a client waits."""
        trips = sum(self.calls.get(name, 0.0) for name in ("evalsha", "xreadgroup"))
        return trips / max(1, len(self.redis_commands))


@dataclass
class Idle:
    """Values per second without requests, for one number of instances."""

    num_instances: int
    gateway_cpu_ms: list[float] = field(default_factory=list)
    redis_cpu_ms: list[float] = field(default_factory=list)
    redis_commands: list[float] = field(default_factory=list)
    redis_bytes: list[float] = field(default_factory=list)


class Watched:
    """One system, and the counters of its processes."""

    def __init__(self, num_instances: int, server: RedisServer, system: FastSystem) -> None:
        self.num_instances, self.system = num_instances, system
        self._redis = redis.Redis.from_url(server.url, socket_timeout=LIMIT_S)
        self._gateway = psutil.Process(system.services[system.names_of(Party.GATEWAY)[0]].pid)
        self._store = psutil.Process(system.services["cache_store"].pid)
        self._num_sent = 0

    def close(self) -> None:
        self._redis.close()

    def read(self) -> Reading:
        info = self._redis.info("everything")
        calls = Counter({
            name.removeprefix("cmdstat_"): int(value["calls"])
            for name, value in info.items()
            if name.startswith("cmdstat_") and name != "cmdstat_info"
        })  # fmt: skip
        return Reading(
            at_s=time.monotonic(),
            gateway_cpu_s=_cpu_s(self._gateway),
            redis_cpu_s=float(info["used_cpu_user"]) + float(info["used_cpu_sys"]),
            store_cpu_s=_cpu_s(self._store),
            redis_bytes=int(info["total_net_input_bytes"]) + int(info["total_net_output_bytes"]),
            calls=calls,
        )

    def questions(self, kind: str, number: int) -> Iterator[Question]:
        """`number` requests of a kind; known images are those of a request before."""
        for index in range(number):
            self._num_sent += 4
            new = tuple(png(self._num_sent + at, SIDE) for at in range(4))
            text = f"question {index}"
            match kind:
                case "text":
                    yield Question(text, num_tokens=1)
                case "stream":
                    yield Question(text, num_tokens=STREAM_TOKENS)
                case "new image":
                    yield Question(text, new[:1], num_tokens=2)
                case "four new images":
                    yield Question(text, new, num_tokens=5)
                case _:
                    yield Question(text, (png(0, SIDE),), num_tokens=2)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def ask_all(watched: Watched, kind: str, number: int, num_clients: int) -> list[float]:
    """Milliseconds of each request, to its last byte; every answer is checked.

    Raises:
        RuntimeError: an answer was not right.
    """
    questions, latencies = watched.questions(kind, number), list[float]()
    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(
        base_url=watched.system.url(), timeout=LIMIT_S, trust_env=False, limits=limits
    ) as client:

        async def one_client() -> None:
            for question in questions:
                start = time.perf_counter()
                answer = await client.post("/v1/chat/completions", json=question.body())
                latencies.append((time.perf_counter() - start) * 1e3)
                if answer.status_code != 200 or question.words[0] not in answer.text:
                    raise RuntimeError(f"{kind}: {answer.status_code} {answer.text[:500]}")

        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(one_client())
    return latencies


async def measure(systems: list[Watched], options: argparse.Namespace) -> tuple[list[Idle], list[Row]]:
    """Measure all systems in turns, in reverse order every second round; results are saved each round."""
    idles = {each.num_instances: Idle(each.num_instances) for each in systems}
    rows = {(each.num_instances, kind): Row(each.num_instances, kind) for each in systems for kind in KINDS}
    for watched in systems:
        for kind in KINDS:
            await ask_all(watched, kind, 8 * options.clients, options.clients)
    for number in range(options.rounds):
        for watched in systems if number % 2 == 0 else reversed(systems):
            before = watched.read()
            await asyncio.sleep(options.idle_s)
            idle = watched.read().since(before)
            _add_idle(idles[watched.num_instances], idle)
            for kind in KINDS:
                before = watched.read()
                latencies = await ask_all(watched, kind, options.requests, options.clients)
                await asyncio.sleep(options.settle_s)  # acks and pins end after the answer
                load = watched.read().since(before)
                _add(rows[watched.num_instances, kind], load, idle, latencies)
            print(f"round {number + 1}: {watched.num_instances} instances", file=sys.stderr)
        if options.json:
            result = {"idle": list(map(vars, idles.values())), "requests": list(map(vars, rows.values()))}
            options.json.write_text(json.dumps(result, indent=1))
    return list(idles.values()), list(rows.values())


def _add_idle(idle: Idle, reading: Reading) -> None:
    idle.gateway_cpu_ms.append(reading.gateway_cpu_s * 1e3 / reading.at_s)
    idle.redis_cpu_ms.append(reading.redis_cpu_s * 1e3 / reading.at_s)
    idle.redis_commands.append(reading.redis_commands / reading.at_s)
    idle.redis_bytes.append(reading.redis_bytes / reading.at_s)


def _add(row: Row, load: Reading, idle: Reading, latencies: list[float]) -> None:
    number, share = len(latencies), load.at_s / idle.at_s

    def each(name: str) -> float:
        value = getattr(load, name) - getattr(idle, name) * share
        return float(value) / number

    row.gateway_cpu_ms.append(each("gateway_cpu_s") * 1e3)
    row.redis_cpu_ms.append(each("redis_cpu_s") * 1e3)
    row.store_cpu_ms.append(each("store_cpu_s") * 1e3)
    row.redis_commands.append(each("redis_commands"))
    row.redis_bytes.append(each("redis_bytes"))
    row.latency_ms.append(statistics.median(latencies))
    for name, count in load.calls.items():
        row.calls[name] += (count - idle.calls[name] * share) / number


def report(idles: list[Idle], rows: list[Row]) -> str:
    lines = [
        "Each request, without the background's share (median of the rounds):",
        "",
        *_header(
            "request",
            "encoders + prefill_decodes",
            "gateway CPU, ms",
            "Redis CPU, ms",
            "store CPU, ms",
            "Redis commands",
            "of these, scripts and reads",
            "p50, ms",
        ),
    ]
    for row in sorted(rows, key=lambda row: (KINDS.index(row.kind), row.num_instances)):
        values = (row.gateway_cpu_ms, row.redis_cpu_ms, row.store_cpu_ms)
        cells = " | ".join(f"{statistics.median(each):.3f}" for each in values)
        lines.append(
            f"| {row.kind} | {row.num_instances} + {row.num_instances} | {cells} "
            f"| {row.own_commands:.1f} | {row.own_trips:.1f} | {statistics.median(row.latency_ms):.2f} |"
        )
    lines += [
        "",
        "In the background, each second:",
        "",
        *_header("encoders + prefill_decodes", "gateway CPU, ms", "Redis CPU, ms", "Redis commands", "bytes"),
    ]
    for idle in sorted(idles, key=lambda idle: idle.num_instances):
        lines.append(
            f"| {idle.num_instances} + {idle.num_instances} | {statistics.median(idle.gateway_cpu_ms):.2f} "
            f"| {statistics.median(idle.redis_cpu_ms):.2f} | {statistics.median(idle.redis_commands):.0f} "
            f"| {statistics.median(idle.redis_bytes):.0f} |"
        )
    return "\n".join(lines)


def _header(*columns: str) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]


def layout(num_instances: int) -> Layout:
    """System of stand-in engines that answer at once, with a deployment's defaults."""
    return Layout(
        num_encoders=num_instances, num_prefill_decodes=num_instances, encode_s=0.0, token_s=0.0,
        takeover_idle_ms=2000, region_bytes=64 << 20,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 4, 16, 64], help="of each kind")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100, help="of each kind in a turn")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--idle-s", type=float, default=5.0, help="seconds without requests in a turn")
    parser.add_argument("--settle-s", type=float, default=0.3, help="after the last answer of a kind")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        systems: list[Watched] = []
        for number in options.instances:
            server = stack.enter_context(embedded_redis())
            system = stack.enter_context(FastSystem(server, layout(number)))
            systems.append(Watched(number, server, system))
            stack.callback(systems[-1].close)
            print(f"up: {number} encoders, {number} prefill_decodes", file=sys.stderr)
        idles, rows = asyncio.run(measure(systems, options))
    print(report(idles, rows))


if __name__ == "__main__":
    main()
