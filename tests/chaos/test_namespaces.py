"""Engines of two namespaces in one deployment: each has its own jobs and tensors; one replaces the other."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest
import redis
from blake3 import blake3

from tests.support.fast.client import Answer, Client, Question
from tests.support.fast.layout import DEPLOYMENT, Layout
from tests.support.fast.processes.tensors import DIGEST, png
from tests.support.fast.scenario import CLIENT_LIMIT_S
from tests.support.fast.system import START_LIMIT_S, FastSystem
from tests.support.protocol_steps import Party
from tests.support.waiting import until
from triptych_common.protocol.names import ENCODERS_GROUP, StreamNames

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

ANOTHER = blake3(b"another namespace").hexdigest()
OF_ANOTHER = (f"--namespace={ANOTHER}",)
NUM_QUESTIONS = 96
NUM_CALLERS = 4  # of each gateway
NUM_ANSWERS = 60
NEVER = "0-0"  # last id of a stream without entries so far

ONE_WRONG = Layout(
    num_encoders=2,
    num_prefill_decodes=1,
    num_gateways=2,
    encode_s=0.02,
    first_token_timeout_s=30.0,  # 96 at once, on a machine that may be busy
    own_options={"encoder-1": OF_ANOTHER},
)
STORE = "cache_store"  # the name that the system gives it
TWO = Layout(
    num_encoders=2,
    num_prefill_decodes=2,
    num_gateways=2,
    encode_s=0.02,
    first_token_timeout_s=30.0,
    own_options={"encoder-1": OF_ANOTHER, "prefill_decode-1": (*OF_ANOTHER, "--model-version=2")},
)


@contextmanager
def raw(system: FastSystem) -> Iterator[Any]:
    with redis.Redis.from_url(system.redis.url, decode_responses=True) as client:
        yield client


def consumers_of(system: FastSystem, digest: str) -> set[str]:
    stream = StreamNames(DEPLOYMENT).encode_jobs(digest, STORE)
    with raw(system) as client:
        return {each["name"] for each in client.xinfo_consumers(stream, ENCODERS_GROUP)}


def last_job(system: FastSystem, digest: str) -> str:
    """Id of the last job that the namespace ever had."""
    with redis.Redis.from_url(system.redis.url) as client:  # decodes nothing: a job that is there has media
        last_id: bytes = client.xinfo_stream(StreamNames(DEPLOYMENT).encode_jobs(digest, STORE))[
            "last-generated-id"
        ]
        return last_id.decode()


async def ask_many(system: FastSystem, first: int, count: int) -> list[Answer]:
    """New images, by all gateways in turn."""
    clients = [Client(system.url(name), CLIENT_LIMIT_S) for name in system.names_of(Party.GATEWAY)]
    questions = [Question(f"image {number}", (png(number),)) for number in range(first, first + count)]
    try:
        return await asyncio.gather(
            *(clients[n % len(clients)].ask(question) for n, question in enumerate(questions))
        )
    finally:
        for client in clients:
            await client.close()


def wrong(answers: list[Answer], *namespaces: str) -> list[str]:
    """Of those that are not right, in all of their words, for one of `namespaces`."""
    of = namespaces or (DIGEST,)
    return [f"{answer} {answer.question.text}" for answer in answers if not answer.is_right_of(of)]


@pytest.mark.parametrize("system", [ONE_WRONG], indirect=True)
async def test_an_encoder_of_another_namespace_takes_no_job(system: FastSystem) -> None:
    answers = await ask_many(system, 1000, NUM_QUESTIONS)
    assert wrong(answers) == []
    assert max(system.tally().num_encodes.values()) == 1
    assert consumers_of(system, DIGEST) == {"encoder-0"}
    assert last_job(system, DIGEST) != NEVER
    assert last_job(system, ANOTHER) == NEVER
    await asyncio.to_thread(system.wait_until_idle)


@asynccontextmanager
async def asking(system: FastSystem, first: int) -> AsyncIterator[list[Answer]]:
    """Texts and images, some of them new, until the block ends; the answers so far."""
    answers: list[Answer] = []
    numbers = itertools.count(first)
    is_over = asyncio.Event()

    async def call(url: str) -> None:
        async with Client(url, CLIENT_LIMIT_S) as client:
            while not is_over.is_set():
                number = next(numbers)
                images = tuple(png(first + (number + each) % 40) for each in range(number % 4))
                answers.append(await client.ask(Question(f"talk {number}", images, stream=number % 2 == 0)))

    async with asyncio.TaskGroup() as group:
        for name in system.names_of(Party.GATEWAY):
            for _ in range(NUM_CALLERS):
                group.create_task(call(system.url(name)))
        try:
            yield answers
        finally:
            is_over.set()


async def until_answered(answers: list[Answer], by: Sequence[str]) -> None:
    """So many more, each right for one of the namespaces, and each of these has answered."""
    start = len(answers)

    def new() -> list[Answer]:
        return answers[start:]

    def has_all() -> bool:
        of_each = all(any(each.is_right_of([digest]) for each in new()) for digest in by)
        return len(new()) >= NUM_ANSWERS and of_each

    await until(has_all, START_LIMIT_S)


@pytest.mark.parametrize("system", [TWO], indirect=True)
@pytest.mark.parametrize("order", [("prefill_decode", "encoder"), ("encoder", "prefill_decode")])
async def test_a_change_from_one_version_to_another(system: FastSystem, order: tuple[str, str]) -> None:
    """One version serves; another one joins and takes its share; the first one ends, under load.

    No request fails, and no word of an answer is made of the other version's tensor.
    """
    for kind in order[::-1]:
        end(system, f"{kind}-1")
        await until_gone(system, f"{kind}-1")
    async with asking(system, 10_000 if order[0] == "encoder" else 20_000) as answers:
        await until_answered(answers, [DIGEST])
        for kind in order:
            system.let_up(f"{kind}-1")
        await until_answered(answers, [DIGEST, ANOTHER])
        for kind in order:
            end(system, f"{kind}-0")
            await until_gone(system, f"{kind}-0")
        num_before = len(answers)
        await until_answered(answers, [ANOTHER])
    assert wrong(answers, DIGEST, ANOTHER) == []
    assert wrong(answers[num_before + 2 * NUM_CALLERS :], ANOTHER) == []  # but for those in flight then
    for kind in order:
        system.let_up(f"{kind}-0")
    await asyncio.to_thread(system.wait_until_whole)
    await asyncio.to_thread(system.wait_until_idle)


def end(system: FastSystem, name: str) -> None:
    system.hold_down(name)
    system.services[name].send(signal.SIGTERM)


async def until_gone(system: FastSystem, name: str) -> None:
    """No gateway sees it any more."""

    def is_gone() -> bool:
        reports = [
            httpx.get(f"{system.url(gateway)}/health/ready", trust_env=False).json()
            for gateway in system.names_of(Party.GATEWAY)
        ]
        seen = {each["instance"] for report in reports for each in report["instances"]}
        return name not in seen and system.services[name].exit_code is not None

    await asyncio.to_thread(system.wait_until, is_gone, START_LIMIT_S, f"{name} is gone")
