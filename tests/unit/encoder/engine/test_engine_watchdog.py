"""The encoder's watchdog ends an engine that hangs, and no engine that is only slow."""

import asyncio

from triptych_encoder.engine.engine_watchdog import EngineWatchdog


async def test_an_engine_that_answers_others_is_only_slow() -> None:
    limit_s = 2.0
    watchdog, is_answered = EngineWatchdog(limit_s), asyncio.Event()

    async def slow() -> None:
        async with watchdog.with_job():
            await is_answered.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(slow())
        for _ in range(4):
            async with watchdog.with_job():
                await asyncio.sleep(0.3 * limit_s)
        is_answered.set()
