"""Encoders on demand: requests wait for one that starts, and none is lost when the last one goes."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.integration.gateway.chat.test_chat import collect, image, text
from tests.support.gateway.fake_encoder import FakeEncoder
from tests.support.gateway.local_encode import ANSWER
from tests.support.gateway.samples import DIGEST, MODEL
from tests.support.gateway.system import System
from tests.support.scraping import scrape
from tests.support.waiting import until, until_async
from triptych_common.coordination import Registry
from triptych_gateway.proxy import streaming
from triptych_gateway.proxy.streaming import COMMENT

ON_DEMAND = {"has_encoder": False, "encoders_on_demand": True, "encoder_grace_s": 60.0}
NUM_ROUNDS = 20
LIMIT_S = 60.0

on_demand = pytest.mark.parametrize("system", [ON_DEMAND], indirect=True)


def body(color: int, **more: Any) -> dict[str, Any]:
    content = [text("what"), image(color)]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}


async def num_waiting(system: System) -> float:
    return (await asyncio.to_thread(scrape, system.gateway.settings.port)).total(
        "triptych_gateway_waiting_for_first_encoder", namespace=DIGEST
    )


async def num_waiting_is(system: System, number: int) -> bool:
    return await num_waiting(system) == number


@on_demand
async def test_requests_wait_for_the_first_encoder_and_text_does_not(system: System) -> None:
    loop = asyncio.get_running_loop()
    asked = [loop.create_task(system.ask([text("what"), image(color)])) for color in range(5)]
    await until_async(lambda: num_waiting_is(system, 5))
    now = await asyncio.to_thread(scrape, system.gateway.settings.port)
    assert now.total("triptych_gateway_encode_seconds_waiting", namespace=DIGEST) > 0
    assert (await system.ask("only text")).choices, "text is not held up"
    async with system.encoder.running():
        answers = await asyncio.gather(*asked)
        assert [each.choices[0].message.content for each in answers] == [ANSWER] * 5
        assert await num_waiting(system) == 0


@on_demand
async def test_a_stream_has_a_comment_at_once_and_then_its_answer(system: System) -> None:
    async with system.http.stream("POST", "/v1/chat/completions", json=body(1, stream=True)) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == COMMENT
        async with system.encoder.running():
            rest = b"".join([piece async for piece in pieces])
        assert rest.startswith(b"data: ")
        assert rest.endswith(b"data: [DONE]\n\n")


@on_demand
async def test_clients_do_not_see_comments(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "COMMENT_INTERVAL_S", 0.0)
    stream = await system.ask([text("what"), image(1)], stream=True)
    async with system.encoder.running():
        assert (await collect(stream)).strip() == ANSWER


@pytest.mark.parametrize("system", [ON_DEMAND | {"encoder_grace_s": 0.3}], indirect=True)
async def test_after_the_grace_a_stream_ends_with_an_error_event(system: System) -> None:
    answer = await system.post(body(1, stream=True))
    assert answer.status_code == 200
    assert answer.text.startswith(COMMENT.decode())
    assert '"code":"no_encoder"' in answer.text
    whole = await system.post(body(2))
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "no_encoder")


@pytest.mark.parametrize("system", [{"has_encoder": False, "encoder_grace_s": 0.3}], indirect=True)
async def test_where_no_encoder_is_started_for_it_a_stream_has_a_proper_error(system: System) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        await system.ask([text("what"), image(1)], stream=True)
    assert caught.value.code == "no_encoder"


@pytest.mark.parametrize("system", [ON_DEMAND | {"max_queue_age_s": 0.5}], indirect=True)
async def test_a_wait_for_the_first_encoder_is_no_slow_queue(system: System) -> None:
    """Its age would refuse all that wait, and all that come, as soon as an encoder is there."""
    loop, registry = asyncio.get_running_loop(), Registry(system.bus)
    slow = FakeEncoder(system.bus, "encoder-1")  # registered, and takes no job yet
    async with registry.keep_registered(slow.record()):
        await until(lambda: system.gateway.view.has_encoder(DIGEST))
        asked = [loop.create_task(system.ask([text("what"), image(1)]))]
        await until_async(lambda: has_job(system))
    await until(lambda: not system.gateway.view.has_encoder(DIGEST))
    await until_async(lambda: has_old_job(system, 0.6))
    asked.append(loop.create_task(system.ask([text("what"), image(2)])))
    await until_async(lambda: num_waiting_is(system, 2))
    async with registry.keep_registered(slow.record()):
        await until_async(lambda: has_settled(system, asked[1]))
        async with system.encoder.running():
            answers = await asyncio.gather(*asked)
            assert [each.choices[0].message.content for each in answers] == [ANSWER] * 2


async def has_job(system: System) -> bool:
    return bool(await system.bus.stream_length(system.bus.names.encode_jobs(DIGEST)))


async def has_settled(system: System, asked: asyncio.Task[Any]) -> bool:
    return asked.done() or await system.bus.stream_length(system.bus.names.encode_jobs(DIGEST)) == 2


async def has_old_job(system: System, age_s: float) -> bool:
    """True once the only job is as old as that."""
    entries = await system.bus.client.xrange(system.bus.names.encode_jobs(DIGEST))
    seconds, micros = await system.bus.client.time()
    assert entries
    added_ms = int(entries[0][0].split(b"-")[0])
    return seconds + micros / 1e6 - added_ms / 1000 >= age_s


@on_demand
async def test_no_request_is_lost_when_the_last_encoder_goes_as_it_arrives(system: System) -> None:
    """The job is published before the encoder leaves, while it does, or after that."""
    loop = asyncio.get_running_loop()
    for number in range(NUM_ROUNDS):
        async with system.encoder.running():
            await until(lambda: system.gateway.view.has_encoder(DIGEST))
            if number % 4 == 1:
                system.encoder.before_metadata.clear()  # the job is in hand when its encoder goes
            asked = [loop.create_task(post(system, 2 * number, stream=number % 2 == 0))]
            if number % 4 == 1:
                num_jobs = len(system.encoder.jobs)
                await until(lambda seen=num_jobs: len(system.encoder.jobs) > seen)
            elif number % 4 == 2:
                await until(lambda: any(item.in_flight for item in system.gateway.orders.table))
        asked.append(loop.create_task(post(system, 2 * number + 1, stream=number % 2 == 1)))
        if number % 2:
            await until(lambda: not system.gateway.view.has_encoder(DIGEST))
        async with system.encoder.running():
            async with asyncio.timeout(LIMIT_S):
                answers = await asyncio.gather(*asked)
        for answer in answers:
            assert answer.status_code == 200, (number, answer.text)
            assert "error" not in answer.text, (number, answer.text)


async def post(system: System, color: int, *, stream: bool) -> httpx.Response:
    return await system.post(body(color, stream=stream))
