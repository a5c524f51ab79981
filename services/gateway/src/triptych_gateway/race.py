"""Runs a coroutine beside guards (disconnect, deadline, failure): the first guard that raises ends it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def race(work: Coroutine[Any, Any, T], *guards: Coroutine[Any, Any, None]) -> T:
    """Result of `work`, unless a guard raises first; then `work` is cancelled and awaited.

    A guard that returns does not end the work. When both failed, the guard's exception is
    raised: it explains the work's. All tasks have ended when this returns or raises.
    """
    loop = asyncio.get_running_loop()
    worker = loop.create_task(work)
    watchers = [loop.create_task(guard) for guard in guards]
    pending: set[asyncio.Future[Any]] = {worker, *watchers}
    try:
        while not worker.done() and not any(_failed(watcher) for watcher in watchers):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    finally:
        won = worker.done() and not _failed(worker)
        for task in (worker, *watchers):
            task.cancel()
        await asyncio.gather(worker, *watchers, return_exceptions=True)
    if won:
        return worker.result()
    for failed in filter(_failed, watchers):
        failed.result()  # raises
    return worker.result()


def _failed(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
