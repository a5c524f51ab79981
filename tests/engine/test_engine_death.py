"""A prefill_decode's engine is killed, its host lives: a request without a token is answered elsewhere."""

import asyncio
import random
import signal
from collections.abc import Iterator

import pytest

from tests.support.fast.client import Answer, Client
from tests.support.real import inspection
from tests.support.real.processes import Part, pids_of, send
from tests.support.real.questions import Catalogue, RealQuestion
from tests.support.real.system import EXACT, System, running_monolith, running_system
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]

SEED = 71
NUM_STREAMS = NUM_WAITING = 6
ENCODE_DELAY_MS = 1000  # requests with images wait for it
LONG_ANSWER = 3000
CLIENT_LIMIT_S = 150.0
LIMIT_S = 60
VICTIM = "prefill_decode-0"


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    with running_monolith(tmp_path_factory.mktemp("monolith")) as monolith:
        return Catalogue.answered_by(monolith, SEED, {1: NUM_WAITING})


@pytest.fixture(scope="module")
def pair(questions: Catalogue) -> Iterator[System]:
    options = " ".join(EXACT)
    with running_system(
        "--prefill-decodes=2", f"--encoder-args={options}", f"--prefill-decode-args={options}",
        TRIPTYCH_DEBUG_ENCODE_DELAY_MS=str(ENCODE_DELAY_MS),
        TRIPTYCH_RESEND_TO_LAST_INSTANCE="true",
    ) as running:  # fmt: skip
        yield running


async def test_only_streams_that_have_begun_break_off(pair: System, questions: Catalogue) -> None:
    rng = random.Random(SEED)
    (url,) = inspection.gateway_urls(pair, 1)
    long = [RealQuestion(f"count to {n}", (), LONG_ANSWER) for n in range(NUM_STREAMS)]
    short = [questions.draw(rng, [True], stream=number % 2 == 0) for number in range(NUM_WAITING)]
    async with Client(url, CLIENT_LIMIT_S) as client, asyncio.TaskGroup() as group:
        streams = [group.create_task(client.ask(question)) for question in long]
        await asyncio.to_thread(wait_until, lambda: has_requests(pair, "running"), LIMIT_S, "a stream runs")
        waiting = [group.create_task(client.ask(question)) for question in short]
        await asyncio.to_thread(wait_until, lambda: has_requests(pair, "waiting"), LIMIT_S, "some wait")
        send(pids_of(pair, VICTIM, Part.ENGINE), signal.SIGKILL)
    answered = [each.result() for each in waiting]
    assert all(answer.is_right for answer in answered), [str(answer) for answer in answered]
    ended = [each.result() for each in streams]
    assert all(is_whole(answer) or is_cut_off_with_an_error(answer) for answer in ended), [
        str(answer) for answer in ended
    ]
    assert any(map(is_cut_off_with_an_error, ended))


def has_requests(system: System, state: str) -> bool:
    return inspection.requests_in_engines(system).get(f"{VICTIM} {state}", 0) > 0


def is_whole(answer: Answer) -> bool:
    return answer.is_complete and not answer.code and len(answer.words) == LONG_ANSWER


def is_cut_off_with_an_error(answer: Answer) -> bool:
    """By an error event of the gateway's, without `[DONE]`."""
    return answer.has_begun and answer.code == "stream_interrupted" and not answer.is_complete
