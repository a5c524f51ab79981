"""Does the engine answer? vLLM tells of an engine that died, when asked; of one that lives and hangs never.

Its host would go on: registered, chosen by every gateway, and each request would wait until its deadline.
"""

import asyncio
from typing import Protocol

from triptych_common.domain.errors import TriptychError


class EngineGoneError(TriptychError):
    """vLLM's engine is dead, or hangs: this process must be restarted."""


class Asked(Protocol):
    """vLLM's `AsyncLLM`, as far as it is asked here."""

    async def is_sleeping(self) -> bool:
        """A question that the engine answers between two steps, or at once when it has nothing to do."""
        ...


async def watch_answers(engine: Asked, *, interval_s: float, timeout_s: float) -> None:
    """Ask again and again, until cancelled.

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
