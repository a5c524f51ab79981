"""More at once than encoders make in time: each request is answered, or refused with a time to come back."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from tests.support.fast.case import check
from tests.support.fast.client import Answer, Client, Question
from tests.support.fast.layout import Layout
from tests.support.fast.processes.tensors import MAX_GRID, png
from tests.support.fast.system import FastSystem
from tests.support.protocol_steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

CLIENT_LIMIT_S = 120.0
ENCODE_S = 0.05
NUM_AT_ONCE, NUM_CLIENTS, NUM_OF_CLIENT = 200, 60, 5
MAX_TRIES = 30  # a time that is a little too short costs a try: the queue only gets shorter
LAYOUT = Layout(
    num_encoders=1,
    num_prefill_decodes=1,
    encode_s=ENCODE_S,
    first_token_timeout_s=60.0,
    region_bytes=64 << 20,
    options={Party.GATEWAY: ("--max-queue-age-s=3",)},
)


async def ask_until_let_in(client: Client, question: Question, found: list[Answer]) -> None:
    """As often as it is refused, after the time that the refusal says."""
    for _ in range(MAX_TRIES):
        answer = await client.ask(question)
        found.append(answer)
        if answer.status != 429:
            return
        assert answer.retry_after_s is not None, answer.whole()
        await asyncio.sleep(answer.retry_after_s)


async def ask_all(system: FastSystem, clients: Sequence[Iterable[Question]]) -> list[list[Answer]]:
    """Every client at once, one question after the other. By question: its answers, refusals first."""
    found: list[list[Answer]] = []

    async def run(client: Client, questions: Iterable[Question]) -> None:
        for question in questions:
            answers: list[Answer] = []
            found.append(answers)
            await ask_until_let_in(client, question, answers)

    async with Client(system.url(), CLIENT_LIMIT_S) as client, asyncio.TaskGroup() as group:
        for questions in clients:
            group.create_task(run(client, questions))
    return found


def codes(answers: Iterable[Answer]) -> Counter[str]:
    return Counter(each.code or str(each.status) for each in answers)


@pytest.mark.parametrize("system", [LAYOUT], indirect=True)
async def test_a_flood_of_new_images_is_answered_or_refused_and_answered_when_it_comes_back(
    system: FastSystem,
) -> None:
    questions = [[Question(f"image {number}", (png(number, MAX_GRID),))] for number in range(NUM_AT_ONCE)]
    found = await ask_all(system, questions)
    refused = [each for answers in found for each in answers[:-1]]
    assert set(codes(refused)) <= {"encode_queue_slow"}, codes(refused)
    check([answers[-1] for answers in found], more=system.log_ends())
    await asyncio.to_thread(system.wait_until_idle)


@pytest.mark.parametrize("system", [LAYOUT], indirect=True)
async def test_a_burst_of_all_kinds_is_answered(system: FastSystem) -> None:
    known = png(10_000)

    def question(number: int) -> Question:
        kind, is_stream = number % 4, number % 8 < 4
        images = {0: (), 1: (known,), 2: (png(20_000 + number),), 3: (known, png(30_000 + number))}[kind]
        return Question(f"question {number}", images, stream=is_stream)

    numbers = [range(at, at + NUM_OF_CLIENT) for at in range(0, NUM_CLIENTS * NUM_OF_CLIENT, NUM_OF_CLIENT)]
    found = await ask_all(system, [[question(each) for each in of_client] for of_client in numbers])
    refused = [each for answers in found for each in answers[:-1]]
    assert set(codes(refused)) <= {"encode_queue_slow"}, codes(refused)
    check([answers[-1] for answers in found], more=system.log_ends())
    await asyncio.to_thread(system.wait_until_idle)
