"""Redis is killed while requests wait, and comes back with its data or without them."""

import asyncio
from pathlib import Path

import pytest

from tests.conftest import embedded_redis
from tests.integration.gateway.redis_faults.checks import answer_or_documented_error, check_well_again
from tests.support.gateway.media_samples import image_part
from tests.support.gateway.system import opened_system
from tests.support.waiting import until


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
