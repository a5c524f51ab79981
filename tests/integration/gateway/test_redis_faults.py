"""Faults of the gateway's Redis: text goes on, media wait or get a clear error, and then all is well."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.conftest import EmbeddedRedis, embedded_redis
from tests.support.faults.tcp_proxy import TcpProxy, proxy_to
from tests.support.gateway.samples import image_part
from tests.support.gateway.system import System, opened_system
from tests.support.waiting import until, until_async

RETRYABLE = {"bus_unavailable", "deadline_exceeded", "encode_failed", "no_encoder", "no_instance"}


async def until_ready(system: System) -> None:
    """The gateway knows an encoder, and its view of the registry is fresh."""

    async def is_ready() -> bool:
        ready = await system.http.get("/health/ready")
        return ready.status_code == 200 and ready.json()["redis"] and ready.json()["encoder_available"]

    await until_async(is_ready)


async def answer_or_documented_error(system: System, color: int, limit_s: float) -> str:
    """'answer', or the code of a retryable error; anything else, or nothing in time, fails the test."""
    refused: openai.APIStatusError | None = None
    try:
        async with asyncio.timeout(limit_s):
            answer = await system.ask([image_part(color)])
    except openai.APIStatusError as error:
        refused = error
    if refused is None:
        assert answer.choices[0].message.content.startswith("1x8x8")
        return "answer"
    assert refused.status_code == 503
    assert refused.code in RETRYABLE
    assert refused.response.headers["retry-after"]
    return str(refused.code)


async def check_well_again(system: System, color: int) -> None:
    """A new image is encoded and answered, and nothing is left of any request."""
    await until_ready(system)
    assert await answer_or_documented_error(system, color, 10) == "answer"
    await system.assert_idle()


@pytest.fixture
async def proxied(own_redis: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[tuple[System, TcpProxy]]:
    with proxy_to(own_redis.socket_path) as proxy:
        async with opened_system(
            own_redis.url, tmp_path, redis_url=proxy.url, publish_timeout_s=2.0
        ) as system:
            yield system, proxy


async def test_before_the_job_is_published(proxied: tuple[System, TcpProxy]) -> None:
    system, proxy = proxied
    proxy.cut()
    asking = asyncio.ensure_future(system.ask([image_part(1)]))
    assert (await system.ask("hello")).choices
    assert not asking.done()
    proxy.restore()
    assert (await asking).choices
    await check_well_again(system, 2)


async def test_while_the_encoder_works(proxied: tuple[System, TcpProxy]) -> None:
    system, proxy = proxied
    system.encoder.before_metadata.clear()
    asking = asyncio.ensure_future(system.ask([image_part(1)]))
    await until(lambda: system.encoder.jobs)
    proxy.cut()
    system.encoder.before_metadata.set()
    assert (await system.ask("hello")).choices
    await until(lambda: system.encoder.num_encodes == 1)
    proxy.restore()
    assert (await asking).choices
    assert system.encoder.num_encodes == 1
    await check_well_again(system, 2)


async def test_readiness_shows_it_and_keeps_text(proxied: tuple[System, TcpProxy]) -> None:
    system, proxy = proxied
    proxy.cut()
    await until(lambda: not system.gateway.view.is_fresh)
    ready = await system.http.get("/health/ready")
    assert (ready.status_code, ready.json()["redis"]) == (200, False)
    assert (await system.ask("hello")).choices
    proxy.restore()
    await until_ready(system)


async def test_again_and_again_under_load(proxied: tuple[System, TcpProxy]) -> None:
    system, proxy = proxied

    async def disturb() -> None:
        for _ in range(10):
            num_before = proxy.num_connections
            await asyncio.to_thread(proxy.drop_connections)
            await until(lambda num_before=num_before: proxy.num_connections > num_before)

    async with asyncio.TaskGroup() as group:
        group.create_task(disturb())
        asked = [group.create_task(system.ask([image_part(color)])) for color in range(20)]
    assert all(task.result().choices for task in asked)
    await check_well_again(system, 21)


async def check_without_redis(system: System) -> None:
    assert (await system.ask("hello")).choices
    assert (await system.ask([image_part(1)])).choices  # known sizes need no Redis
    with pytest.raises(openai.InternalServerError) as caught:
        await system.ask([image_part(2)])
    assert (caught.value.status_code, caught.value.code) == (503, "bus_unavailable")
    assert caught.value.response.headers["retry-after"]


async def check_with_redis_again(system: System) -> None:
    await until_ready(system)
    assert (await system.ask([image_part(2)])).choices[0].message.content.startswith("1x8x8")
    await system.assert_idle()


async def test_redis_dies_and_comes_back_empty(own_redis: EmbeddedRedis, tmp_path: Path) -> None:
    async with opened_system(own_redis.url, tmp_path, publish_timeout_s=1.0) as system:
        await system.ask([image_part(1)])
        await asyncio.to_thread(own_redis.stop)
        await check_without_redis(system)
        await asyncio.to_thread(own_redis.start)
        await check_with_redis_again(system)


async def test_redis_hangs(own_redis: EmbeddedRedis, tmp_path: Path) -> None:
    async with opened_system(own_redis.url, tmp_path, publish_timeout_s=0.5) as system:
        await system.ask([image_part(1)])
        own_redis.freeze()
        try:
            await check_without_redis(system)
        finally:
            own_redis.thaw()
        await check_with_redis_again(system)


async def test_with_data_while_the_encoder_works(tmp_path: Path) -> None:
    with embedded_redis(keeps_data=True) as redis:
        async with opened_system(redis.url, tmp_path) as system:
            system.encoder.before_metadata.clear()
            asking = asyncio.ensure_future(system.ask([image_part(1)]))
            await until(lambda: system.encoder.jobs)
            await asyncio.to_thread(redis.stop)
            assert (await system.ask("hello")).choices
            await asyncio.to_thread(redis.start)
            system.encoder.before_metadata.set()
            assert (await asking).choices
            await until(lambda: system.encoder.num_encodes)  # the answer needs the sizes alone
            assert system.encoder.num_encodes == 1
            await check_well_again(system, 2)


@pytest.mark.parametrize("keeps_data", [True, False], ids=["with data", "without data"])
async def test_requests_that_come_all_the_time(tmp_path: Path, *, keeps_data: bool) -> None:
    with embedded_redis(keeps_data=keeps_data) as redis:
        async with opened_system(redis.url, tmp_path, first_token_timeout_s=6.0) as system:
            async with asyncio.TaskGroup() as group:
                images = [group.create_task(answer_or_documented_error(system, 0, 10))]
                texts = [group.create_task(system.ask("hello"))]
                for color in range(1, 15):
                    images.append(group.create_task(answer_or_documented_error(system, color, 10)))
                    texts.append(group.create_task(system.ask("hello")))
                    if color == 5:
                        await until(lambda: system.encoder.jobs)
                        await asyncio.to_thread(redis.stop)
                    if color == 10:
                        await asyncio.to_thread(redis.start)
                    await asyncio.wait({texts[-1]})
            assert all(task.result().choices for task in texts)
            outcomes = [task.result() for task in images]
            if keeps_data:
                assert set(outcomes) == {"answer"}
            await check_well_again(system, 30)


async def test_every_reply_is_late(own_redis: EmbeddedRedis, tmp_path: Path) -> None:
    with proxy_to(own_redis.socket_path) as proxy:
        async with opened_system(own_redis.url, tmp_path, redis_url=proxy.url) as system:
            proxy.reply_delay_s = 0.25
            asking = [asyncio.ensure_future(system.ask([image_part(color)])) for color in range(5)]
            assert (await system.ask("hello")).choices
            assert not any(task.done() for task in asking)
            assert all(answer.choices for answer in await asyncio.gather(*asking))
            await until(lambda: system.encoder.num_encodes == 5)  # the answers need the sizes alone
            assert len(system.encoder.jobs) == 5
            proxy.reply_delay_s = 0.0
            await check_well_again(system, 10)
