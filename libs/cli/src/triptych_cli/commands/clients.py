"""Clients of the running system, for the commands that inspect it."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from triptych_cli.console import fail
from triptych_cli.settings import CliSettings
from triptych_cli.supervisor.state import SystemStatus, read_status
from triptych_cli.system.layout import lasting_layout
from triptych_common.bus import AsyncBus
from triptych_common.domain.errors import StoreProtocolError, TriptychError
from triptych_common.protocol.store import StoreReply
from triptych_common.store_session import AsyncStoreSession

Reply = TypeVar("Reply")


class NothingRunningError(Exception):
    """No system of `up` is running."""


def running_system() -> SystemStatus:
    """Raises NothingRunningError."""
    status = read_status(lasting_layout(CliSettings()).state_file)
    if status is None:
        raise NothingRunningError
    return status


@asynccontextmanager
async def store_session() -> AsyncIterator[AsyncStoreSession]:
    """A session with the store of the running system."""
    status = running_system()
    async with await AsyncStoreSession.connect(status.store_socket, f"cli/{os.getpid()}") as session:
        yield session


@asynccontextmanager
async def message_bus() -> AsyncIterator[AsyncBus]:
    """The bus of the running system."""
    status = running_system()
    async with await AsyncBus.connect(status.redis_url, status.deployment, client_name="cli") as bus:
        yield bus


def expect(kind: type[Reply], reply: StoreReply) -> Reply:
    """`reply`. Raises StoreProtocolError when it is of another kind."""
    if not isinstance(reply, kind):
        raise StoreProtocolError("bad_frame", f"the store answered {reply.TYPE}")
    return reply


def run(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a command's coroutine; what it cannot reach becomes a message and exit code 1."""
    try:
        return asyncio.run(work())
    except NothingRunningError:
        fail("nothing is running; start it with ./triptych up")
    except (TriptychError, OSError) as error:
        fail(str(error))
    return 1
