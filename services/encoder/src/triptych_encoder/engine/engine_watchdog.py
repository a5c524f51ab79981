"""How long the engine may take to answer while it has work: one that hangs is as good as dead.

Its host lives, and renews the leases of its jobs: without an end no other encoder would ever take them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from triptych_encoder.encoding import EngineFailedError


class EngineWatchdog:
    """With one engine. An answer to any of its jobs shows that it is only slow."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._timers: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def with_job(self) -> AsyncIterator[None]:
        """The block ends with the engine's answer.

        Raises:
            EngineFailedError: it has answered no job for `limit_s` seconds.
        """
        try:
            async with asyncio.timeout(self._limit_s) as timer:
                self._timers.add(timer)
                try:
                    yield
                finally:
                    self._timers.discard(timer)
        except TimeoutError as error:
            raise EngineFailedError(f"the encoder's engine has not answered for {self._limit_s} s") from error
        self._on_answer()

    def _on_answer(self) -> None:
        until = asyncio.get_running_loop().time() + self._limit_s
        for timer in self._timers:
            if not timer.expired():
                timer.reschedule(until)
