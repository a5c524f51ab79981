"""A prefill_decode that dies while the gateway connects to it, or while a connection to it is idle."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import ClientConnectionError

from tests.support.faults.resets import LIMIT_S, LOOPS, Asyncio, Uvloop, resetting_server, show_connections
from triptych_gateway.proxy.upstream import UnreachableError, open_answer
from triptych_gateway.upstream_client import new_client

MAX_BYTES = 1 << 20


async def wait_reset(transport: asyncio.Transport, protocol: Any) -> None:
    """Return when the loop has seen the reset. `protocol` is aiohttp's."""
    async with asyncio.timeout(LIMIT_S):
        with suppress(ClientConnectionError):
            await protocol.closed
    assert transport.is_closing()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
def test_one_that_dies_while_it_is_connected_to_is_unreachable(
    loop: type[Uvloop | Asyncio], stream: bool
) -> None:
    async def ask() -> None:
        async with new_client(5.0, 5.0) as client:
            with pytest.raises(UnreachableError):
                await open_answer(client, server.url, b"{}", {}, stream=stream, max_bytes=MAX_BYTES)

    async def reset(transport: asyncio.Transport, protocol: Any) -> None:
        server.reset()
        await wait_reset(transport, protocol)

    with resetting_server(answers=False) as server, asyncio.Runner(loop_factory=loop) as runner:
        show_connections(runner, reset)
        runner.run(ask())


@pytest.mark.parametrize("loop", LOOPS)
def test_an_idle_connection_that_was_reset_is_no_fault_of_other_requests(
    loop: type[Uvloop | Asyncio],
) -> None:
    made: list[tuple[asyncio.Transport, Any]] = []

    async def keep(transport: asyncio.Transport, protocol: Any) -> None:
        made.append((transport, protocol))

    async def ask() -> None:
        async with new_client(5.0, 5.0) as client:
            with await open_answer(client, gone.url, b"{}", {}, stream=False, max_bytes=MAX_BYTES) as answer:
                assert answer.first == b"{}"
            gone.reset()
            await wait_reset(*made[0])
            with await open_answer(client, other.url, b"{}", {}, stream=False, max_bytes=MAX_BYTES) as answer:
                assert answer.first == b"{}"

    with (
        resetting_server(answers=True) as gone,
        resetting_server(answers=True) as other,
        asyncio.Runner(loop_factory=loop) as runner,
    ):
        show_connections(runner, keep)
        runner.run(ask())
