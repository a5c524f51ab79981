"""Waits: in an event loop, and for other processes; and free ports for them."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from triptych_cli.system.machine import free_ports


async def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Return once `condition` holds; for what a test can only observe."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def until_async(condition: Callable[[], Awaitable[object]], limit_s: float = 60.0) -> None:
    """Return once `condition()` gives something true; for what a test can only ask."""
    async with asyncio.timeout(limit_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str | Callable[[], str]) -> None:
    """Wait for something in another process that cannot be awaited here.

    `what`: for the message of a failure; a callable is asked when it comes to that.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.05)


def free_port() -> int:
    return free_ports(1)[0]


def free_ports_in_a_row(count: int) -> int:
    """The first of `count` free ports."""
    for _ in range(100):
        first = free_port()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    pytest.fail(f"no {count} free ports in a row")
