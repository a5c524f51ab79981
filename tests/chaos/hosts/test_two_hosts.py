"""An encoder on one host, a prefill_decode on another, an hour ahead: all is right, and nothing stays."""

import asyncio
import threading

import pytest

from tests.support.fast.case import check
from tests.support.fast.client import Client, Question
from tests.support.fast.faults import Faults
from tests.support.fast.processes.points import SENDING
from tests.support.fast.processes.tensors import MAX_GRID, png
from tests.support.fast.scenario import CLIENT_LIMIT_S
from tests.support.hosts.fabric_points import ALWAYS, UNREACHED
from tests.support.hosts.system import HostsSystem
from tests.support.protocol_steps import FABRIC_STEPS, Occurs

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

SOURCE, TARGET = "store-a", "store-b"
LIMIT_S = 8.0
NUM_QUESTIONS = 24
FIRST = 60_000  # of the images: those of other files have other numbers


async def test_an_item_gets_to_the_host_that_needs_it(system: HostsSystem) -> None:
    before, seals_before = system.tally(), system.store_stats(TARGET).num_seals_total
    same = [Question(f"question {number}", (png(FIRST + 7),)) for number in range(8)]
    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        answers = await asyncio.gather(*(client.ask(question) for question in same))
        answers += [await client.ask(same[0])]
    check(answers, more=system.log_ends())
    assert sum(system.tally().since(before).num_jobs.values()) == 1
    assert system.store_stats(TARGET).num_seals_total - seals_before == 1
    await asyncio.to_thread(system.wait_until_idle)
    assert {name for name in ALWAYS if f"{name}.{SENDING}" not in system.seen_points()} <= {
        "sealed_to_source"
    }


async def test_what_is_known_elsewhere_is_pulled(system: HostsSystem) -> None:
    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        answers = [await client.ask(Question("first", (png(FIRST + 20),)))]
        await asyncio.to_thread(system.wait_until_idle)
        await asyncio.to_thread(system.evict_all, TARGET)
        before = system.tally()
        answers.append(await client.ask(Question("again", (png(FIRST + 20),))))
    check(answers, more=system.log_ends())
    assert not system.tally().since(before).encodes
    await asyncio.to_thread(system.wait_until_idle)


async def test_what_is_nowhere_any_more_is_encoded_again(system: HostsSystem) -> None:
    """The directory still names both stores."""
    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        answers = [await client.ask(Question("first", (png(FIRST + 30),)))]
        await asyncio.to_thread(system.wait_until_idle)
        await asyncio.to_thread(system.evict_all)
        answers.append(await client.ask(Question("again", (png(FIRST + 30),))))
    check(answers, more=system.log_ends())
    await asyncio.to_thread(system.wait_until_idle)


async def test_many_at_once_are_right(system: HostsSystem) -> None:
    questions = [
        Question(f"many {n}", tuple(png(FIRST + 400 + n % 7 + i) for i in range(n % 4)))
        for n in range(NUM_QUESTIONS)
    ]
    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        left = [client.ask(Question(f"leaves {n}", (png(FIRST + 450 + n),)), 0.02 * n) for n in range(6)]
        answers = await asyncio.gather(*(client.ask(each) for each in questions), *left)
    check(answers[: len(questions)], more=system.log_ends())
    await asyncio.to_thread(system.wait_until_idle)


async def test_every_step_occurs(system: HostsSystem, faults: Faults) -> None:
    """So that a new step between hosts cannot be left out of the tests of faults."""
    await _kill_the_writer(system, faults)
    await _stop_the_target(system, faults)
    seen = {point.split(".")[0] for point in system.seen_points()}
    expected = {each.name for each in FABRIC_STEPS if each.occurs is not Occurs.APART}
    assert sorted(expected - seen - UNREACHED.keys()) == []


async def _kill_the_writer(system: HostsSystem, faults: Faults) -> None:
    """An encoder is killed while both stores wait for what it writes."""

    def kill(instance: str) -> None:
        system.wait_until(
            lambda: system.store_stats(TARGET).num_reservations > 0, LIMIT_S, "the target has reserved"
        )
        faults.kill(instance)

    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        with faults.at("seal", SENDING, kill):
            answer = await client.ask(Question("writer lost", (png(FIRST + 500, MAX_GRID),)))
    check([answer], more=system.log_ends())
    await asyncio.to_thread(system.wait_until_whole)
    await asyncio.to_thread(system.wait_until_idle)


async def _stop_the_target(system: HostsSystem, faults: Faults) -> None:
    """The target's agent hangs for longer than a source's waits, in the middle of a push."""
    agent, source_gave_up = "fabric-b", threading.Event()

    def stop(instance: str) -> None:
        faults.stop(agent)
        timer = threading.Timer(2 * system.layout.progress_timeout_s, _go_on, (faults, agent, source_gave_up))
        timer.start()

    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        with faults.at("bytes", SENDING, stop):
            await client.ask(Question("hanging", (png(FIRST + 510, MAX_GRID),)))
        assert await asyncio.to_thread(source_gave_up.wait, CLIENT_LIMIT_S)
        check([await client.ask(Question("after", (png(FIRST + 511),)))], more=system.log_ends())
    await asyncio.to_thread(system.wait_until_idle)


def _go_on(faults: Faults, victim: str, done: threading.Event) -> None:
    faults.go_on(victim)
    done.set()
