"""Redis dies and comes back empty, or hangs: text goes on, media get a clear error, then all is well."""

import asyncio
from pathlib import Path

import openai
import pytest

from tests.conftest import EmbeddedRedis
from tests.integration.gateway.redis_faults.checks import until_ready
from tests.support.gateway.media_samples import image_part
from tests.support.gateway.system import System, opened_system


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
