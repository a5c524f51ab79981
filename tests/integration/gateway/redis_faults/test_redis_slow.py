"""Redis answers late: images are answered later, text is not; nothing is encoded twice."""

import asyncio
from pathlib import Path

from tests.conftest import EmbeddedRedis
from tests.integration.gateway.redis_faults.checks import check_well_again
from tests.support.faults.tcp_proxy import proxy_to
from tests.support.gateway.media_samples import image_part
from tests.support.gateway.system import opened_system


async def test_every_reply_is_late(own_redis: EmbeddedRedis, tmp_path: Path) -> None:
    with proxy_to(own_redis.socket_path) as proxy:
        async with opened_system(own_redis.url, tmp_path, redis_url=proxy.url) as system:
            proxy.reply_delay_s = 0.25
            asking = [asyncio.ensure_future(system.ask([image_part(color)])) for color in range(5)]
            assert (await system.ask("hello")).choices
            assert not any(task.done() for task in asking)
            assert all(answer.choices for answer in await asyncio.gather(*asking))
            assert system.encoder.num_encodes == 5
            assert len(system.encoder.jobs) == 5
            proxy.reply_delay_s = 0.0
            await check_well_again(system, 10)
