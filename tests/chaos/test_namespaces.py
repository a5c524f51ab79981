"""Engines of two namespaces in one deployment: each encoder takes its own jobs, and no other's are failed."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
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
from triptych_common.protocol.names import ENCODERS_GROUP, StreamNames
from triptych_common.protocol.steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

ANOTHER = blake3(b"another namespace").hexdigest()
OF_ANOTHER = (f"--namespace={ANOTHER}",)
NUM_QUESTIONS = 96
NEVER = "0-0"  # last id of a stream without entries so far

ONE_WRONG = Layout(
    num_encoders=2,
    num_prefill_decodes=1,
    num_gateways=2,
    encode_s=0.02,
    first_token_timeout_s=30.0,  # 96 at once, on a machine that may be busy
    own_options={"encoder-1": OF_ANOTHER},
)
TWO = Layout(
    num_encoders=2,
    num_prefill_decodes=2,
    num_gateways=2,
    encode_s=0.02,
    first_token_timeout_s=30.0,
    own_options={"encoder-1": OF_ANOTHER, "prefill_decode-1": OF_ANOTHER},
)


@contextmanager
def raw(system: FastSystem) -> Iterator[Any]:
    with redis.Redis.from_url(system.redis.url, decode_responses=True) as client:
        yield client


def consumers_of(system: FastSystem, digest: str) -> set[str]:
    stream = StreamNames(DEPLOYMENT).encode_jobs(digest)
    with raw(system) as client:
        return {each["name"] for each in client.xinfo_consumers(stream, ENCODERS_GROUP)}


def last_job(system: FastSystem, digest: str) -> str:
    """Id of the last job that the namespace ever had."""
    with redis.Redis.from_url(system.redis.url) as client:  # decodes nothing: a job that is there has media
        last_id: bytes = client.xinfo_stream(StreamNames(DEPLOYMENT).encode_jobs(digest))["last-generated-id"]
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


def wrong(answers: list[Answer]) -> list[str]:
    """Of those that are not right."""
    return [f"{answer} {answer.question.text}" for answer in answers if not answer.is_right]


@pytest.mark.parametrize("system", [ONE_WRONG], indirect=True)
async def test_an_encoder_of_another_namespace_takes_no_job(system: FastSystem) -> None:
    answers = await ask_many(system, 1000, NUM_QUESTIONS)
    assert wrong(answers) == []
    assert max(system.tally().num_encodes.values()) == 1
    assert consumers_of(system, DIGEST) == {"encoder-0"}
    assert last_job(system, DIGEST) != NEVER
    assert last_job(system, ANOTHER) == NEVER
    await asyncio.to_thread(system.wait_until_idle)


@pytest.mark.parametrize("system", [TWO], indirect=True)
async def test_a_change_from_one_namespace_to_another(system: FastSystem) -> None:
    """Both are there; then the instances of the first end, one after the other, under load."""
    before = await ask_many(system, 2000, NUM_QUESTIONS)
    assert wrong(before) == []
    assert last_job(system, DIGEST) != NEVER
    asking = asyncio.ensure_future(ask_many(system, 3000, NUM_QUESTIONS))
    end(system, "prefill_decode-0")
    meanwhile = await asking
    assert [each for each in meanwhile if not (each.is_right or each.is_documented_error)] == []
    await until_gone(system, "prefill_decode-0")
    after = await ask_many(system, 4000, NUM_QUESTIONS)
    assert wrong(after) == []
    assert last_job(system, ANOTHER) != NEVER
    end(system, "encoder-0")
    await until_gone(system, "encoder-0")
    alone = await ask_many(system, 5000, NUM_QUESTIONS)
    assert wrong(alone) == []
    for name in ("encoder-0", "prefill_decode-0"):
        system.let_up(name)
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
