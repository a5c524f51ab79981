"""A prefill_decode that dies while the gateway connects to it, or while a connection to it is idle."""

import asyncio
from typing import Any

import pytest

from tests.support.faults.resets import LOOPS, Asyncio, Uvloop, resetting_server, wait_reset
from triptych_gateway.chat.upstream import UnreachableError, new_client, open_answer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
def test_one_that_dies_while_it_is_connected_to_is_unreachable(
    loop: type[Uvloop | Asyncio], stream: bool
) -> None:
    async def ask() -> None:
        async with new_client(5.0, 5.0) as client:
            with pytest.raises(UnreachableError):
                async with open_answer(client, server.url, b"{}", {}, stream=stream):
                    pass

    async def reset(transport: asyncio.Transport, protocol: Any) -> None:
        server.reset()
        await wait_reset(transport, protocol)

    with resetting_server(answers=False) as server, asyncio.Runner(loop_factory=loop) as runner:
        runner.get_loop().on_connection = reset
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
            async with open_answer(client, gone.url, b"{}", {}, stream=False) as answer:
                assert answer.first == b"{}"
            gone.reset()
            made[0][0].resume_reading()  # as if the reset had come with the answer's last bytes
            await wait_reset(*made[0])
            async with open_answer(client, other.url, b"{}", {}, stream=False) as answer:
                assert answer.first == b"{}"

    with (
        resetting_server(answers=True) as gone,
        resetting_server(answers=True) as other,
        asyncio.Runner(loop_factory=loop) as runner,
    ):
        runner.get_loop().on_connection = keep
        runner.run(ask())
