"""A replica is promoted under load: text goes on, images are answered or get 503."""

import asyncio
from pathlib import Path

from tests.integration.gateway.redis_faults.checks import answer_or_documented_error, check_well_again
from tests.support.faults.redis_pair import running_pair
from tests.support.faults.tcp_proxy import proxy_to
from tests.support.gateway.system import opened_system
from tests.support.waiting import until


async def test_failover_under_load(tmp_path: Path) -> None:
    with running_pair() as pair, proxy_to(pair.primary.port) as address:
        async with opened_system(address.url, tmp_path) as system:

            async def fail_over() -> None:
                await until(lambda: len(system.encoder.jobs) > 3)
                await asyncio.to_thread(pair.fail_over)
                address.turn_to(pair.primary.port)

            async with asyncio.TaskGroup() as group:
                group.create_task(fail_over())
                images, texts = [], []
                for color in range(1, 21):
                    images.append(group.create_task(answer_or_documented_error(system, color, 15)))
                    texts.append(group.create_task(system.ask("hello")))
                    await asyncio.wait({texts[-1]})
            assert all(task.result().choices for task in texts)
            assert {task.result() for task in images} == {"answer"}  # the replica had everything
            await check_well_again(system, 30)
