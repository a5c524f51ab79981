"""First tokens of three systems on separate hosts, in turns; engines are stand-ins.

remote   the encoder on one host, the prefill_decode on another: items cross the network
local    both on one host, with an agent that has nothing to do
alone    the same without an agent
"""

import asyncio
import itertools
import random
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from tests.support.fast.client import Answer, Client, Question
from tests.support.fast.processes.tensors import MAX_GRID, WIDE_WIDTH, png, wide_png
from tests.support.hosts.layout import HostsLayout, Place
from tests.support.hosts.network import Network
from tests.support.hosts.system import HostsSystem, running_hosts
from tests.support.protocol_steps import Party

EVERYTHING = Place(num_encoders=1, num_prefill_decodes=1, num_gateways=1)
APART = {"a": Place(num_encoders=1), "b": Place(num_prefill_decodes=1, num_gateways=1)}
TOGETHER = {"a": Place(), "b": EVERYTHING}
ITEM_BYTES = MAX_GRID * MAX_GRID * WIDE_WIDTH * 4
REGION_BYTES = 256 << 20
ENCODE_S = 0.12
NUM_IMAGES = {"one": 1, "four": 4, "small": 1}
NUM_BURST, NUM_WARM_UPS, NUM_CONNECTS = 16, 3, 20
LIMIT_S = 60.0
ECHO_PORT = 7422


@dataclass
class HandoverFigures:
    """Seconds by arm and workload, in the order of the repeats."""

    ttft_s: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    burst_s: dict[str, list[float]] = field(default_factory=dict)
    round_trip_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, arm: str, workload: str, answer: Answer) -> None:
        if not answer.is_right or answer.first_token_at is None:
            self.failures.append(f"{arm}, {workload}: {answer}")
            first_s = float("nan")
        else:
            first_s = answer.first_token_at - answer.asked_at
        self.ttft_s.setdefault((arm, workload), []).append(first_s)


def measure(repeats: int, rate_bits: int, seed: int) -> HandoverFigures:
    figures = HandoverFigures()
    with _opened(rate_bits) as systems:
        figures.round_trip_s = _round_trip_s(systems["remote"].network)
        asyncio.run(_take_turns(systems, figures, repeats, random.Random(seed)))
    return figures


@contextmanager
def _opened(rate_bits: int) -> Iterator[dict[str, HostsSystem]]:
    usual = HostsLayout(
        places=TOGETHER, encode_s=ENCODE_S, region_bytes=REGION_BYTES, first_token_timeout_s=LIMIT_S,
        options={Party.ENCODER: ("--encodes-at-once=1",)},
    )  # fmt: skip
    layouts = {
        "remote": replace(usual, places=APART),
        "local": usual,
        "alone": replace(usual, has_agents=False),
    }
    with ExitStack() as stack:
        systems = {arm: stack.enter_context(running_hosts(layout)) for arm, layout in layouts.items()}
        for system in systems.values():
            for host in system.layout.places:
                system.network.set_rate(host, rate_bits)
        yield systems


async def _take_turns(
    systems: dict[str, HostsSystem], figures: HandoverFigures, repeats: int, rng: random.Random
) -> None:
    numbers = itertools.count(1)
    turns = [(arm, workload) for arm in systems for workload in (*NUM_IMAGES, "burst")]
    for repeat in range(-NUM_WARM_UPS, repeats):
        kept = figures if repeat >= 0 else HandoverFigures()
        for arm, workload in rng.sample(turns, len(turns)):
            if arm == "remote" and workload in ("small", "burst"):
                continue
            async with Client(systems[arm].url(), LIMIT_S) as client:
                if workload == "burst":
                    await _burst(client, arm, numbers, kept)
                else:
                    kept.add(arm, workload, await client.ask(_question(workload, numbers)))
            await asyncio.to_thread(systems[arm].wait_until_idle)


def _question(workload: str, numbers: "itertools.count[int]") -> Question:
    make = png if workload in ("small", "burst") else wide_png
    images = tuple(make(100_000 + next(numbers)) for _ in range(NUM_IMAGES.get(workload, 1)))
    return Question(f"{workload} {next(numbers)}", images)


async def _burst(client: Client, arm: str, numbers: "itertools.count[int]", figures: HandoverFigures) -> None:
    questions = [_question("burst", numbers) for _ in range(NUM_BURST)]
    began = time.monotonic()
    answers = await asyncio.gather(*(client.ask(question) for question in questions))
    figures.burst_s.setdefault(arm, []).append(time.monotonic() - began)
    figures.failures += [f"{arm}, burst: {answer}" for answer in answers if not answer.is_right]


def _round_trip_s(network: Network) -> float:
    """Median seconds to open a connection."""
    address = (str(network["b"].address), ECHO_PORT)
    taken = []
    with network["b"].call(lambda: socket.create_server(address)):
        for _ in range(NUM_CONNECTS):
            began = time.monotonic()
            network["a"].call(lambda: socket.create_connection(address, LIMIT_S)).close()
            taken.append(time.monotonic() - began)
    return statistics.median(taken)
