"""Detects an engine that hangs: vLLM itself reports a dead engine only, and only when asked.

Its host would go on: registered, chosen by every gateway, and each request would wait until its deadline.
"""

import asyncio
from typing import Protocol

from triptych_common.domain.errors import TriptychError
from triptych_vllm_connector.host.engine_watchdog import EngineWatchdog, StallCheck


class EngineGoneError(TriptychError):
    """vLLM's engine is dead, or hangs: this process must be restarted."""


class AnsweringEngine(Protocol):
    """vLLM's `AsyncLLM`, as far as it is used here."""

    async def is_sleeping(self) -> bool:
        """A request that the engine answers between two steps, or at once when it has nothing to do."""
        ...


async def watch_answers(engine: AnsweringEngine, check: StallCheck, *, interval_s: float) -> None:
    """Ask the engine every `interval_s` seconds, until cancelled.

    Raises:
        EngineGoneError: it has not answered, and hangs.
    """
    watchdog = EngineWatchdog(check, EngineGoneError)
    while True:
        await asyncio.sleep(interval_s)
        async with watchdog.waiting():
            await engine.is_sleeping()
