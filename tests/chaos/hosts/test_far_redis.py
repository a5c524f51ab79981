"""Redis is far from all hosts: requests are right, within the round trips of docs/guide/several-hosts.md.

No test asserts a time. What a first token waits for is found by holding everything else back.
"""

import asyncio
import itertools
import socket
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import redis

from tests.support.fast.case import check
from tests.support.fast.client import Answer, Client, Question
from tests.support.fast.faults import Faults
from tests.support.fast.layout import DEPLOYMENT
from tests.support.fast.processes.tensors import png
from tests.support.fast.scenario import CLIENT_LIMIT_S
from tests.support.faults.distance import DistantRedis, RoundTrip, counted, distant_redis
from tests.support.hosts.control_redis import control_redis
from tests.support.hosts.layout import CONTROL, HostsLayout
from tests.support.hosts.namespaces import require_namespaces
from tests.support.hosts.network import Network
from tests.support.hosts.system import HostsSystem
from tests.support.protocol_steps import Party
from triptych_common.protocol.names import StreamNames

PORT = 6380
"""Port of the proxy, on the host of Redis."""


@contextmanager
def running_far_from_redis(layout: HostsLayout) -> Iterator[tuple[HostsSystem, DistantRedis]]:
    """Run hosts as `running_hosts` does. Redis is near at first, and the test does not pass the proxy."""
    with Network([*layout.places, CONTROL]) as network, control_redis(network[CONTROL]) as server:
        address = (str(network[CONTROL].address), PORT)
        listener = network[CONTROL].call(lambda: socket.create_server(address))
        with listener, distant_redis(server.socket_path, listener) as far:
            server.service_url = f"redis://{address[0]}:{PORT}/0"
            with HostsSystem(network, server, layout) as system:
                yield system, far


pytestmark = [pytest.mark.chaos, pytest.mark.slow]

NEAR_S, FAR_S = 0.002, 0.020  # a round trip
TARGET, PREFILL_DECODE = "store-b", "prefill_decode-b-0"
LIMIT_S = 20.0
MEASURED_S = (0.0, NEAR_S, FAR_S, 0.1)
NUM_MEASURED, NUM_ELSEWHERE = 7, 3

NEW = Counter(
    {
        "gateway HGET entries": 1, "gateway HGET sizes": 1,
        "gateway claim_flight": 1, "encoder start_job": 1, "encoder XADD metadata": 1,
        "gateway XADD transfers": 1,
    }
)  # fmt: skip
"""What the first token of a new image waits for, where the encoder is on another host."""

AFTER_NEW = Counter(
    {
        "gateway set_field": 1, "gateway leave_flight": 1, "gateway add_place": 2,
        "prefill_decode XADD preallocations": 1, "prefill_decode XADD encode-results": 1,
        "prefill_decode XADD acks": 1,
        "encoder XADD encode-results": 1, "encoder finish_flight": 1,
        "encoder XDEL encode-jobs": 1,
        "fabric XADD encode-results": 1,
    }
)  # fmt: skip
"""What is done for it besides; no first token waits for it."""

CHECKS = Counter({"gateway claim_flight": 5})
"""By time, of a request that waits for long: whether its item is still on its way. Here only by chance."""

SOMETIMES = Counter(
    {
        "gateway add_place": 1,  # two go out together
        "prefill_decode XADD preallocations": 1, "prefill_decode XADD encode-results": 1,  # it came first
        "prefill_decode XADD acks": 1,
        "encoder XDEL encode-jobs": 1,  # with a wait for entries
    }
)  # fmt: skip
"""Of `AFTER_NEW`, what need not be: it depends on which process is first."""

KNOWN = Counter({"gateway HGET entries": 1})
"""An image that the store of the prefill_decode has."""

ELSEWHERE = KNOWN + Counter({"gateway XADD transfers": 1})
AFTER_ELSEWHERE = Counter({"fabric XADD encode-results": 1})
"""A known image that only the other store has."""

AGAIN = Counter(
    {
        "prefill_decode XADD encode-results": 1, "gateway remove_place": 1,
        "gateway XADD transfers": 1, "fabric XADD encode-results": 1, "gateway add_place": 2,
    }
)  # fmt: skip
"""What may be asked besides: prefill_decode misses the item, and tells the gateway once it is there."""

_numbers = itertools.count(70_000)  # of the images


@dataclass
class Far:
    system: HostsSystem
    proxy: DistantRedis
    faults: Faults

    async def ask(self, *images: int) -> Answer:
        """A right answer; and everything it causes is done."""
        question = Question(f"question {next(_numbers)}", tuple(map(png, images)))
        async with Client(self.system.url(), CLIENT_LIMIT_S) as client:
            answer = await client.ask(question)
        check([answer], more=self.system.log_ends())
        await asyncio.to_thread(self.system.wait_until_idle)
        return answer

    async def check_trips(self, expected: Counter[str], at_most: Counter[str] | None = None) -> None:
        """Since they were last taken, of all processes together."""
        found: list[RoundTrip] = []

        def are_all_there() -> bool:  # some go out once the answer is complete
            found.extend(self.proxy.take_trips())
            return expected <= counted(found)

        try:
            await asyncio.to_thread(
                self.system.wait_until, are_all_there, LIMIT_S, f"round trips {dict(expected)}"
            )
        finally:
            surplus = counted(found) - (at_most or expected)
            assert not surplus, f"more than the page says: {dict(surplus)}; all: {dict(counted(found))}"


@pytest.fixture(scope="module")
def running() -> Iterator[Far]:
    require_namespaces()
    idle_ms = ("--takeover-idle-ms=2000",)  # the default: an encoder waits for jobs without a pause
    layout = HostsLayout(encode_s=0.005, options={Party.ENCODER: idle_ms})
    with running_far_from_redis(layout) as (system, proxy):
        faults = Faults(system)
        yield Far(system, proxy, faults)
        faults.close()


@pytest.fixture
async def far(running: Far) -> Far:
    """Connections are made and scripts are known; no round trip is on the list."""
    running.proxy.round_trip_s = 0.0
    await running.ask(next(_numbers))
    running.proxy.round_trip_s = NEAR_S
    await running.ask(next(_numbers))
    running.proxy.take_trips()
    return running


@pytest.mark.parametrize("round_trip_s", [NEAR_S, FAR_S])
async def test_every_kind_is_right(far: Far, round_trip_s: float) -> None:
    far.proxy.round_trip_s = round_trip_s
    image = next(_numbers)
    await far.ask(image)
    await far.ask(image)
    await far.ask()
    await asyncio.gather(*(far.ask(next(_numbers), image) for _ in range(6)))


async def test_text_asks_nothing(far: Far) -> None:
    await far.ask()
    await far.check_trips(Counter())


@pytest.mark.long  # which round trips there are depends on which process is first, too
async def test_a_known_image_asks_once(far: Far) -> None:
    image = next(_numbers)
    await far.ask(image)
    await far.check_trips(NEW + AFTER_NEW - SOMETIMES, NEW + AFTER_NEW + CHECKS + AGAIN)
    await far.ask(image)
    await far.check_trips(KNOWN)


@pytest.mark.long  # which round trips there are depends on which process is first, too
async def test_a_known_image_of_another_store_is_ordered_in_one_more(far: Far) -> None:
    image = next(_numbers)
    await far.ask(image)
    await _forget_at_target(far)
    far.proxy.take_trips()
    await far.ask(image)
    await far.check_trips(ELSEWHERE + AFTER_ELSEWHERE, ELSEWHERE + AFTER_ELSEWHERE + AGAIN)


@pytest.mark.long  # which round trips there are depends on which process is first, too
async def test_a_new_image_waits_for_nothing_else(far: Far) -> None:
    """All other replies are held back until the answer is there, and nobody gives up waiting for one."""
    left = NEW + CHECKS

    def is_held(trip: RoundTrip) -> bool:
        if not trip.is_of_request or left[trip.name] > 0:
            left[trip.name] -= 1
            return False
        return True

    question = Question("held", (png(next(_numbers)),))
    async with Client(far.system.url(), CLIENT_LIMIT_S) as client:
        with far.proxy.holding(is_held):
            answer = await client.ask(question)
            num_given_up = far.proxy.num_given_up
    check([answer], more=f"held back: {counted(far.proxy.held)}\n{far.system.log_ends()}")
    assert num_given_up == 0
    assert counted(far.proxy.held) <= AFTER_NEW + AGAIN
    assert far.proxy.held
    await asyncio.to_thread(far.system.wait_until_idle)


@pytest.mark.long
async def test_how_much_later_a_first_token_comes(far: Far) -> None:
    """The figures of docs/guide/several-hosts.md: run it by its name, with `-s`. Asserts nothing of them."""
    near: dict[str, float] = {}
    for round_trip_s in MEASURED_S:
        far.proxy.round_trip_s = round_trip_s
        taken: dict[str, list[float]] = {"text": [], "known": [], "elsewhere": [], "new": []}
        for _ in range(NUM_MEASURED):
            image = next(_numbers)
            taken["new"].append(_first_token_s(await far.ask(image)))
            taken["known"].append(_first_token_s(await far.ask(image)))
            taken["text"].append(_first_token_s(await far.ask()))
            if len(taken["elsewhere"]) < NUM_ELSEWHERE:
                await _forget_at_target(far)
                taken["elsewhere"].append(_first_token_s(await far.ask(image)))
        for kind, times in taken.items():
            median = statistics.median(times)
            later = median - near.setdefault(kind, median)
            trips = later / round_trip_s if round_trip_s else 0.0
            print(f"{1000 * round_trip_s:4.0f} ms {kind:10}{1000 * median:8.1f} ms, +{trips:.1f} round trips")


def _first_token_s(answer: Answer) -> float:
    assert answer.first_token_at is not None
    return answer.first_token_at - answer.asked_at


async def _forget_at_target(far: Far) -> None:
    """Neither its store nor its engine has a tensor, and the directory knows it."""
    await asyncio.to_thread(far.faults.kill, PREFILL_DECODE)
    await asyncio.to_thread(far.system.wait_until_whole)
    await asyncio.to_thread(far.system.evict_all, TARGET)
    entries = StreamNames(DEPLOYMENT).entries
    with redis.Redis.from_url(far.system.redis.url) as client:
        for item, places in client.hgetall(entries).items():
            others = [each for each in places.split(b"\n") if not each.startswith(TARGET.encode())]
            client.hset(entries, item, b"\n".join(others))
    await far.ask()
