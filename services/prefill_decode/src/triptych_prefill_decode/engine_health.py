"""Detects an engine that hangs: vLLM itself reports a dead engine only, and only when asked.

Its host would go on: registered, chosen by every gateway, and each request would wait until its deadline.
"""

import asyncio
from typing import Protocol

from triptych_common.domain.errors import TriptychError


class EngineGoneError(TriptychError):
    """vLLM's engine is dead, or hangs: this process must be restarted."""


class AnsweringEngine(Protocol):
    """vLLM's `AsyncLLM`, as far as it is used here."""

    async def is_sleeping(self) -> bool:
        """A request that the engine answers between two steps, or at once when it has nothing to do."""
        ...


async def watch_answers(engine: AnsweringEngine, *, interval_s: float, timeout_s: float) -> None:
    """Until cancelled.

    Raises:
        EngineGoneError: no answer within `timeout_s` seconds.
    """
    while True:
        await asyncio.sleep(interval_s)
        try:
            async with asyncio.timeout(timeout_s):
                await engine.is_sleeping()
        except TimeoutError as error:
            raise EngineGoneError(f"vLLM's engine has not answered for {timeout_s} s") from error
