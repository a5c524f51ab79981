"""The system of these tests itself: without a fault all is right, and every step of the protocol occurs."""

import asyncio
import threading

import pytest
from support.fast.case import check
from support.fast.client import Client, Question
from support.fast.faults import Faults
from support.fast.layout import Layout
from support.fast.points import SENDING
from support.fast.scenario import CLIENT_LIMIT_S, HOSTS, UNREACHED, Action, Scenario, points_of
from support.fast.system import FastSystem
from support.fast.tensors import MAX_GRID, answer_words, png, word_of_media

from triptych_common.protocol.steps import STEPS, Occurs, Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

LEAVE_AFTER_S = 2.0


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
    assert sum(system.tally().num_encodes.values()) == 1
    await asyncio.to_thread(system.wait_until_idle)


@pytest.mark.parametrize("system", [Layout(num_encoders=1)], indirect=True)
async def test_every_step_occurs(system: FastSystem, faults: Faults, scenario: Scenario) -> None:
    """So that a new step of the protocol cannot be left out of the tests of faults."""
    encoding = next(point for point in points_of(Party.ENCODER) if str(point) == f"seal.{SENDING}")
    await scenario.run(encoding, Party.ENCODER, Action.KILL)
    await _leave_while_prefill_decode_waits(system, faults)
    await asyncio.to_thread(system.wait_until_idle)
    seen = {point.split(".")[0] for point in system.seen_points()}
    expected = {each.name for each in STEPS if each.occurs is not Occurs.APART and HOSTS.get(each.sender)}
    assert sorted(expected - seen - UNREACHED.keys()) == []


async def _leave_while_prefill_decode_waits(system: FastSystem, faults: Faults) -> None:
    """With an item that is there, one that is being made, and one whose space others hold."""
    there = png(8)
    large = [png(900 + number, MAX_GRID) for number in range(8)]
    waiting = [Question("holds space", (there, *large[:4])), Question("has none", (there, *large[4:]))]
    released = threading.Event()
    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        check([await client.ask(Question("before", (there,)))], more=system.log_ends())
        with faults.at("seal", SENDING, lambda instance: released.wait(CLIENT_LIMIT_S) and None):
            left = await asyncio.gather(*(client.ask(question, LEAVE_AFTER_S) for question in waiting * 2))
            released.set()
    check(left, lambda answer: answer.fault == "left", more=system.log_ends())
