"""Removal of expired files, which are refused from their expiry on, removed or not."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from triptych_common.telemetry.logs import get_logger
from triptych_gateway.files.file_store import FileStore

log = get_logger(__name__)

REMOVED_AT_ONCE = 100
LONGEST_WAIT_S = 3600.0  # other gateways' files are removed by them; if such a gateway is gone, by this one
AFTER_FAILURE_S = 60.0


class ExpirySweep:
    """Sweep of one gateway's files, asleep until the next one is due. `run` must run."""

    def __init__(self, store: FileStore, threads: Executor) -> None:
        self._store = store
        self._threads = threads
        self._next_at: float | None = None  # wall clock, seconds
        self._changed = asyncio.Event()

    def note_file(self, expires_at: float) -> None:
        """Note the expiry of a new file. A running sweep may have missed it, so another one follows."""
        if self._next_at is None or expires_at < self._next_at:
            self._next_at = expires_at
            self._changed.set()

    async def run(self, measure: Callable[[], Awaitable[None]]) -> None:
        """Remove expired files for ever; `measure` is awaited after each removal."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            self._next_at = None
            wait_s = LONGEST_WAIT_S
            try:
                num_removed, self._next_at = await loop.run_in_executor(
                    self._threads, self._store.remove_expired, REMOVED_AT_ONCE
                )
            except OSError as error:
                log.warning("expired files not removed", error=repr(error))
                wait_s, self._next_at = AFTER_FAILURE_S, None
            else:
                if num_removed:
                    log.info("expired files removed", num_files=num_removed)
                    await measure()
            if self._next_at is not None:
                wait_s = min(wait_s, max(self._next_at - time.time(), 0.0))
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
