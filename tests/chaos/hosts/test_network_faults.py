"""Cuts, losses and slow links between hosts: the item comes another way, or there is one clear error in time;
afterwards all is right, and nothing stays reserved or pinned on any host.
"""

import asyncio
from collections.abc import Callable

import pytest

from tests.support.fast.case import check, is_right_or_documented_error
from tests.support.fast.client import Answer, Client, Question
from tests.support.fast.faults import Faults
from tests.support.fast.processes.points import SENDING
from tests.support.fast.processes.tensors import MAX_GRID, png
from tests.support.fast.scenario import CLIENT_LIMIT_S
from tests.support.hosts.layout import CONTROL
from tests.support.hosts.network import Network
from tests.support.hosts.system import HostsSystem

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

SLOW_BITS = 10_000_000
LOSS = 0.02
SHORT_S, LONG_S = 3.0, 30.0
FIRST = 50_000  # of the images: those of other files have other numbers
Break = Callable[[Network], None]

CUTS: dict[str, Break] = {
    "between the hosts": lambda network: network.cut("a", "b"),
    "from the source": lambda network: network.cut("a", "b", both_ways=False),
    "to the source": lambda network: network.cut("b", "a", both_ways=False),
}
REDIS_CUTS: dict[str, Break] = {
    "source and Redis": lambda network: network.cut("a", CONTROL),
    "target and Redis": lambda network: network.cut("b", CONTROL),
    "from the source to Redis": lambda network: network.cut("a", CONTROL, both_ways=False),
    "from Redis to the source": lambda network: network.cut(CONTROL, "a", both_ways=False),
    "from the target to Redis": lambda network: network.cut("b", CONTROL, both_ways=False),
    "from Redis to the target": lambda network: network.cut(CONTROL, "b", both_ways=False),
}


def questions(title: str, first: int) -> list[Question]:
    """Each with images that no host has."""
    return [
        Question(f"{title} one", (png(first, MAX_GRID),)),
        Question(f"{title} several", tuple(png(first + number) for number in range(1, 4))),
        Question(f"{title} whole", (png(first + 4),), stream=False),
        Question(f"{title} text"),
    ]


async def asked(system: HostsSystem, what: list[Question]) -> list[Answer]:
    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        return list(await asyncio.gather(*(client.ask(question) for question in what)))


async def recovers(system: HostsSystem, first: int) -> None:
    """New items are right, and nothing is left."""
    await asyncio.to_thread(system.wait_until_whole)
    check(await asked(system, questions("after", first)), more=system.log_ends())
    await asyncio.to_thread(system.wait_until_idle)


@pytest.mark.parametrize("name", CUTS)
async def test_cut_in_the_middle_of_a_push(
    system: HostsSystem, network: Network, faults: Faults, name: str
) -> None:
    first = FIRST + 20 * list(CUTS).index(name)
    with faults.at("bytes", SENDING, lambda instance: CUTS[name](network)) as reached:
        answers = await asked(system, questions(name, first))
    assert reached.is_set()
    check(answers, is_right_or_documented_error, system.log_ends())
    network.mend_all()
    await recovers(system, first + 10)


@pytest.mark.parametrize("name", CUTS)
async def test_a_short_cut_costs_time_alone(
    system: HostsSystem, network: Network, faults: Faults, name: str
) -> None:
    """TCP sends again what was lost before an agent gives up."""
    first = FIRST + 100 + 20 * list(CUTS).index(name)

    def cut_and_mend(instance: str) -> None:
        CUTS[name](network)
        asyncio.run_coroutine_threadsafe(_mend_soon(network), loop)

    loop = asyncio.get_running_loop()
    with faults.at("bytes", SENDING, cut_and_mend) as reached:
        answers = await asked(system, questions(name, first))
    assert reached.is_set()
    check(answers, more=system.log_ends())
    await recovers(system, first + 10)


async def _mend_soon(network: Network) -> None:
    await asyncio.sleep(0.5)
    await asyncio.to_thread(network.mend_all)


async def test_a_slow_link(system: HostsSystem, network: Network) -> None:
    with network.slow("a", SLOW_BITS):
        answers = await asked(system, questions("slow", FIRST + 200))
    check(answers, more=system.log_ends())
    await recovers(system, FIRST + 210)


async def test_a_lossy_link(system: HostsSystem, network: Network) -> None:
    with network.lossy("a", "b", LOSS), network.lossy("b", CONTROL, LOSS), network.lossy("a", CONTROL, LOSS):
        answers = await asked(system, questions("lossy", FIRST + 300))
    check(answers, more=system.log_ends())
    await recovers(system, FIRST + 310)


@pytest.mark.parametrize(
    ("name", "for_s"),
    [
        *[(name, SHORT_S) for name in REDIS_CUTS],
        *[pytest.param(name, LONG_S, marks=pytest.mark.long) for name in REDIS_CUTS],
    ],
)
async def test_a_host_without_redis(system: HostsSystem, network: Network, name: str, for_s: float) -> None:
    """Its instances are forgotten, and come back by themselves."""
    first = FIRST + 400 + 20 * list(REDIS_CUTS).index(name) + (200 if for_s == LONG_S else 0)
    asking = asyncio.ensure_future(asked(system, questions(name, first)))
    REDIS_CUTS[name](network)
    try:
        await asyncio.sleep(for_s)
    finally:
        network.mend_all()
    check(await asking, is_right_or_documented_error, system.log_ends())
    await recovers(system, first + 10)
