"""The system of these tests itself: without a fault all is right, and every step of the protocol occurs."""

import asyncio
import threading

import pytest

from tests.support.fast.case import check
from tests.support.fast.client import Client, Question
from tests.support.fast.faults import Faults
from tests.support.fast.layout import Layout
from tests.support.fast.processes.points import SENDING
from tests.support.fast.processes.tensors import MAX_GRID, answer_words, png, word_of_media
from tests.support.fast.scenario import (
    CLIENT_LIMIT_S,
    COMMON_STEPS,
    HOSTS,
    UNREACHED,
    Action,
    Scenario,
    points_of,
)
from tests.support.fast.system import FastSystem
from tests.support.protocol_steps import Occurs, Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

LIMIT_S = 8.0  # below the deadline of a request's first token


def test_another_tensor_is_another_answer() -> None:
    right, wrong = Question("what?", (png(1),)), Question("what?", (png(2),))
    assert right.words != wrong.words
    assert right.words == answer_words([word_of_media(png(1))], "what?", 8)


async def test_an_image_is_encoded_once_for_everybody(system: FastSystem) -> None:
    same = [Question(f"question {number}", (png(7),)) for number in range(8)]
    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        answers = await asyncio.gather(*(client.ask(question) for question in same))
        answers += [await client.ask(same[0])]
    check(answers, more=system.log_ends())
    tally = system.tally()
    assert sum(tally.num_jobs.values()) == 1
    assert tally.beyond_takeovers == {}
    await asyncio.to_thread(system.wait_until_idle)


@pytest.mark.parametrize("system", [Layout(num_encoders=1, num_prefill_decodes=1)], indirect=True)
async def test_every_step_occurs(system: FastSystem, faults: Faults, scenario: Scenario) -> None:
    """So that a new step of the protocol cannot be left out of the tests of faults."""
    encoding = next(point for point in points_of(Party.ENCODER) if str(point) == f"seal.{SENDING}")
    await scenario.run(encoding, Party.ENCODER, Action.KILL)
    await _kill_a_writer_that_is_watched(system, faults)
    await _leave_while_prefill_decode_waits(system, faults)
    await asyncio.to_thread(system.wait_until_idle)
    seen = {point.split(".")[0] for point in system.seen_points()}
    expected = {
        each.name for each in COMMON_STEPS if each.occurs is not Occurs.APART and HOSTS.get(each.sender)
    }
    assert sorted(expected - seen - UNREACHED.keys()) == []


async def _kill_a_writer_that_is_watched(system: FastSystem, faults: Faults) -> None:
    """The encoder is killed when it has written an item, and prefill_decode waits for the store's push."""
    first, watched = png(800), png(801)

    def both_watch() -> bool:
        return system.store_stats().num_watches == 2  # its encoder has, before it began to write

    def kill(instance: str) -> None:
        system.wait_until(both_watch, LIMIT_S, "prefill_decode watches the entry")
        faults.kill(instance)

    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        # The size is known from now on. The question below begins in another way: no prefix is cached.
        answers = [await client.ask(Question("sizes", (first, watched)))]
        await asyncio.to_thread(system.wait_until_idle)
        await asyncio.to_thread(system.evict_all)
        with faults.at("seal", SENDING, kill):
            answers.append(await client.ask(Question("watched", (watched,))))
    check(answers, more=system.log_ends())
    await asyncio.to_thread(system.wait_until_whole)


async def _leave_while_prefill_decode_waits(system: FastSystem, faults: Faults) -> None:
    """One has an item that is there, and others that are being made; the other one has no space."""
    there, *large = [png(8), *(png(900 + number, MAX_GRID) for number in range(5))]
    holds_space = Question("holds space", (large[0], there, large[1], large[2]))
    has_none = Question("has none", (large[1], large[0], large[3], large[4]))
    (prefill_decode,) = system.names_of(Party.PREFILL_DECODE)
    released = threading.Event()

    def waiting() -> tuple[int, ...]:
        status = system.status_of(prefill_decode)
        return tuple(status[what] for what in ("pinned", "watching", "pending"))

    def one_holds() -> bool:
        return waiting() == (1, 3, 0)

    def both_wait() -> bool:
        return waiting() == (1, 3, 1)

    def both_left() -> bool:
        return system.status_of(prefill_decode)["live"] == 0

    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        # Their sizes are known from now on. Neither question below begins like one of these.
        sizes = [
            await client.ask(Question("sizes", tuple(images))) for images in (large[4:1:-1], large[2::-1])
        ]
        await asyncio.to_thread(system.wait_until_idle)
        await asyncio.to_thread(system.evict_all)
        check([*sizes, await client.ask(Question("there", (there,)))], more=system.log_ends())
        with faults.at("seal", SENDING, lambda instance: released.wait(CLIENT_LIMIT_S) and None):
            asking = [asyncio.ensure_future(client.ask(holds_space))]
            try:
                await asyncio.to_thread(system.wait_until, one_holds, LIMIT_S, "one holds space")
                asking.append(asyncio.ensure_future(client.ask(has_none)))
                await asyncio.to_thread(system.wait_until, both_wait, LIMIT_S, "both wait")
            finally:
                for each in asking:
                    each.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
            await asyncio.to_thread(system.wait_until, both_left, LIMIT_S, "both have left")
            released.set()
