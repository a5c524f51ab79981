"""A machine without room for another connection: the agent waits, and leaks nothing."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from functools import partialmethod
from typing import Any, cast

import pytest

from tests.support.waiting import free_port
from triptych_fabric.receiver import listener as listener_module
from triptych_fabric.receiver.listener import FabricListener
from triptych_fabric.receiver.peer import FabricPeer
from triptych_fabric.wire.channel import FabricChannel


class NoRoom:
    """Fails so many times, then calls what it stands for; `succeeded` then."""

    def __init__(self, error: Exception, wrapped: Callable[..., Any]) -> None:
        self.num_calls = 0
        self.succeeded = asyncio.Event()
        self._error = error
        self._wrapped = wrapped

    def __call__(self, *args: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == 1:
            raise self._error
        self.succeeded.set()
        return self._wrapped(*args)


class StandIn:
    """For a peer that keeps its channel."""

    sender = None

    def __init__(self, channel: FabricChannel, on_closed: Callable[[FabricPeer], None]) -> None:
        self.channel = channel
        self.closed = asyncio.get_running_loop().create_future()
        self.closed.set_result(None)

    def close(self) -> None:
        self.channel.close()


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "PAUSE_S", 0.01)


def cut_off(sock: socket.socket) -> bytes:
    with sock:
        sock.settimeout(10.0)
        return sock.recv(1)


async def test_without_a_file_for_it_a_connection_waits_and_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept = NoRoom(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), socket.socket.accept)
    monkeypatch.setattr(socket.socket, "accept", partialmethod(accept))
    peers: list[StandIn] = []

    def new_peer(channel: FabricChannel, on_closed: Callable[[FabricPeer], None]) -> FabricPeer:
        peers.append(StandIn(channel, on_closed))
        return cast(FabricPeer, peers[-1])

    listener = FabricListener(new_peer)
    port = free_port()
    listener.serve("127.0.0.1", port)
    with socket.create_connection(("127.0.0.1", port)):
        await asyncio.wait_for(accept.succeeded.wait(), 10.0)
        # Once before the pause and once behind it; the loop may wait for the next connection by now.
        assert accept.num_calls in (2, 3)
    await listener.close(1.0)


async def test_without_a_thread_for_it_a_connection_is_closed() -> None:
    failing = NoRoom(RuntimeError("can't start new thread"), StandIn)
    listener = FabricListener(cast(Any, failing))
    port = free_port()
    listener.serve("127.0.0.1", port)
    first = socket.create_connection(("127.0.0.1", port))
    assert await asyncio.to_thread(cut_off, first) == b""
    with socket.create_connection(("127.0.0.1", port)):
        await asyncio.wait_for(failing.succeeded.wait(), 10.0)
    assert len(listener.peers) == 1
    await listener.close(1.0)
