"""The gateway's connection to Redis is cut; Redis, the encoder and prefill_decode see nothing of it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.conftest import EmbeddedRedis
from tests.integration.gateway.redis_faults.checks import check_well_again, until_ready
from tests.support.faults.tcp_proxy import TcpProxy, proxy_to
from tests.support.gateway.media_samples import image_part
from tests.support.gateway.system import System, opened_system
from tests.support.waiting import until


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


async def test_for_longer_than_a_job_may_wait(proxied: tuple[System, TcpProxy]) -> None:
    system, proxy = proxied
    proxy.cut()
    with pytest.raises(openai.InternalServerError) as caught:
        await system.ask([image_part(1)])
    assert (caught.value.status_code, caught.value.code) == (503, "bus_unavailable")
    assert caught.value.response.headers["retry-after"]
    assert (await system.ask("hello")).choices
    proxy.restore()
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
