"""Many concurrent streams through one arm: broken streams, latency of each token, resources.

The upstream writes into each event its number and the time (`upstream`, "stamped"), so a token's latency is
that of its own way: upstream's write to client's read.
"""

import asyncio
import re
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from gateway_bench.arms import Arm
from gateway_bench.load import Client, Workload

_TOKEN = re.compile(rb'"content":"(\d+) (\d+)"')
_TAIL_BYTES = 64  # of a chunk, that may hold the beginning of a token


@dataclass(frozen=True)
class StreamsWorkload(Workload):
    """Workload whose events are stamped."""

    @property
    def upstream_field(self) -> str:
        return f"{super().upstream_field},stamped"


@dataclass
class StreamsResult:
    """Results of all streams of one run."""

    latency_ms: "array[float]" = field(default_factory=lambda: array("d"))  # of each token
    num_broken: int = 0  # ended without all of their tokens, in order
    errors: list[str] = field(default_factory=list)  # the first ones
    kib_per_stream: float = 0.0  # of the arm's resident memory, all streams being open
    cpu_s: float = 0.0
    seconds: float = 0.0


class StreamClient(Client):
    """One stream: its tokens' numbers and latencies."""

    def __init__(self) -> None:
        super().__init__()
        self.latency_ms = array("d")
        self.num_tokens = 0
        self.is_in_order = True
        self._tail = b""

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        now = time.perf_counter_ns()
        body, end = self._tail + body, 0
        for found in _TOKEN.finditer(body):
            self.is_in_order &= int(found[1]) == self.num_tokens
            self.num_tokens += 1
            self.latency_ms.append((now - int(found[2])) / 1e6)
            end = found.end()
        self._tail = body[max(end, len(body) - _TAIL_BYTES) :]


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


async def run_streams(arm: Arm, workload: StreamsWorkload) -> StreamsResult:
    """Run all streams of `workload` concurrently, opened within the time until their first token."""
    result, clients = StreamsResult(), list[StreamClient]()
    before_kib = 0 if arm.pid is None else resident_kib(arm.pid)
    before_s, began = arm.cpu_s(), time.perf_counter()

    async def one(client: StreamClient, starts_after_s: float) -> None:
        await asyncio.sleep(starts_after_s)
        try:
            await client.ask(workload.request)
        except (RuntimeError, TimeoutError) as error:
            result.errors.append(repr(error))

    try:
        for _ in range(workload.num_clients):
            clients.append(await StreamClient.connect(arm.url))
        spread_s = workload.first_ms / 1000 / workload.num_clients
        async with asyncio.TaskGroup() as group:
            for number, client in enumerate(clients):
                group.create_task(one(client, spread_s * number))
            if arm.pid is not None:
                await asyncio.sleep((workload.first_ms + workload.answer_s * 1000) / 2000)
                taken_kib = resident_kib(arm.pid) - before_kib
                result.kib_per_stream = taken_kib / workload.num_clients
    finally:
        for client in clients:
            client.close()
    result.seconds, result.cpu_s = time.perf_counter() - began, arm.cpu_s() - before_s
    for client in clients:
        result.latency_ms.extend(client.latency_ms)
        result.num_broken += not client.is_in_order or client.num_tokens != workload.num_events
    return result
