"""Redis is full: text and known images go on for as long as it takes, new images get 503."""

import asyncio
import time
from pathlib import Path

from tests.conftest import EmbeddedRedis
from tests.integration.gateway.redis_faults.checks import answer_or_documented_error, check_well_again, image
from tests.support.faults.redis_pair import raw
from tests.support.gateway.system import opened_system
from tests.support.waiting import until
from triptych_common.coordination.registry import TTL_S


async def test_for_longer_than_heartbeats_last(own_redis: EmbeddedRedis, tmp_path: Path) -> None:
    async with opened_system(own_redis.url, tmp_path) as system, asyncio.timeout(60):
        await system.ask([image(1)])
        (job,) = system.encoder.jobs
        inflight = system.bus.names.inflight(job.mm_hash)
        with raw(own_redis) as client:
            # The answer may come before the encoder's last messages, which would find no room.
            await until(lambda: not client.exists(inflight))
            client.config_set("maxmemory", "1")
            ends_at = time.monotonic() + TTL_S + 1
            while time.monotonic() < ends_at:
                assert (await system.ask("hello")).choices
                assert (await system.ask([image(1)])).choices
                assert await answer_or_documented_error(system, 2, 10) == "bus_unavailable"
                await asyncio.sleep(0.5)
            assert len(system.gateway.view.serving) == 1
            client.config_set("maxmemory", "0")
        await check_well_again(system, 2)
