"""Three hosts whose clocks differ by hours: an item goes to each that needs it, from where it is."""

import asyncio

import pytest

from tests.support.fast.case import check
from tests.support.fast.client import Client, Question
from tests.support.fast.processes.tensors import png
from tests.support.fast.scenario import CLIENT_LIMIT_S
from tests.support.hosts.layout import HostsLayout, Place
from tests.support.hosts.system import HostsSystem

HOUR_S = 3600.0
LAYOUT = HostsLayout(
    places={
        "a": Place(num_encoders=2),
        "b": Place(num_prefill_decodes=1, num_gateways=1, clock_ahead_s=2 * HOUR_S),
        "c": Place(num_prefill_decodes=1, clock_ahead_s=-3 * HOUR_S),
    }
)

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.parametrize("system", [LAYOUT], indirect=True, ids=["hours apart"]),
]

NUM_QUESTIONS = 40


async def test_all_answers_are_right_and_each_host_gets_an_item_once(system: HostsSystem) -> None:
    questions = [
        Question(f"question {n}", tuple(png(n % 5 + i) for i in range(1, 1 + n % 3)))
        for n in range(NUM_QUESTIONS)
    ]
    before = system.tally()
    num_images = len({image for question in questions for image in question.images})
    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        answers = await asyncio.gather(*(client.ask(question) for question in questions))
    check(answers, more=system.log_ends())
    assert sum(system.tally().since(before).num_jobs.values()) == num_images
    for store in ("store-b", "store-c"):
        assert 0 < system.store_stats(store).num_seals_total <= num_images
    await asyncio.to_thread(system.wait_until_idle)


async def test_a_host_without_a_gateway_or_an_encoder_pulls(system: HostsSystem) -> None:
    """From the one that did not encode it, too: the one that did has lost it."""
    before = system.tally()
    questions = [Question(f"pulled {n}", (png(200),)) for n in range(8)]
    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        answers = list(await asyncio.gather(*(client.ask(question) for question in questions)))
        await asyncio.to_thread(system.wait_until_idle)
        await asyncio.to_thread(system.evict_all, "store-a")
        answers += await asyncio.gather(*(client.ask(Question(f"{n} again", (png(200),))) for n in range(8)))
    check(answers, more=system.log_ends())
    assert sum(system.tally().since(before).num_jobs.values()) == 1
    await asyncio.to_thread(system.wait_until_idle)
