"""Clients of the running system, for the commands that inspect it.

The system is the one `up` has started on this machine, else the one whose addresses are in the environment,
as in each container of Compose.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from triptych_cli.console import fail
from triptych_cli.settings import CliSettings
from triptych_cli.supervisor.state import read_status
from triptych_cli.system.layout import lasting_layout
from triptych_common.bus import AsyncBus
from triptych_common.domain.errors import StoreProtocolError, TriptychError
from triptych_common.protocol.store import MAX_LISTED, Entries, EntryInfo, ListEntries, StoreReply
from triptych_common.store_session import AsyncStoreSession

Reply = TypeVar("Reply")


class NothingRunningError(Exception):
    """No system of `up` is running, and the environment names none."""


@dataclass(frozen=True)
class SystemAddresses:
    redis_url: str | None  # None: the environment does not say
    deployment: str
    store_socket: str


def running_system() -> SystemAddresses:
    """Addresses of the running system; raises NothingRunningError without one."""
    settings = CliSettings()
    status = read_status(lasting_layout(settings).state_file)
    if status is not None:
        return SystemAddresses(status.redis_url, status.deployment, status.store_socket)
    if settings.redis_url is None and not settings.store_socket.is_socket():
        raise NothingRunningError
    return SystemAddresses(settings.redis_url, settings.deployment, str(settings.store_socket))


def traces_folder() -> Path:
    """Folder with the system's span files, which outlives the system."""
    settings = CliSettings()
    folder = lasting_layout(settings).traces_dir
    return folder if folder.exists() or settings.traces_dir is None else settings.traces_dir


@asynccontextmanager
async def store_session() -> AsyncIterator[AsyncStoreSession]:
    socket = running_system().store_socket
    async with await AsyncStoreSession.connect(socket, f"cli/{os.getpid()}") as session:
        yield session


@asynccontextmanager
async def message_bus() -> AsyncIterator[AsyncBus]:
    system = running_system()
    if system.redis_url is None:
        raise NothingRunningError
    async with await AsyncBus.connect(system.redis_url, system.deployment, client_name="cli") as bus:
        yield bus


async def list_entries(session: AsyncStoreSession, limit: int | None = None) -> list[EntryInfo]:
    """Entries of the store by hash, read page by page, up to `limit`."""
    found: list[EntryInfo] = []
    while limit is None or len(found) < limit:
        asked = MAX_LISTED if limit is None else min(MAX_LISTED, limit - len(found))
        command = ListEntries(seq=0, limit=asked, after=found[-1].mm_hash if found else None)
        page = expect(Entries, await session.request(command)).entries
        found += page
        if len(page) < asked:
            break
    return found


def expect(kind: type[Reply], reply: StoreReply) -> Reply:
    """`reply`, checked; raises StoreProtocolError if it is of another kind."""
    if not isinstance(reply, kind):
        raise StoreProtocolError("bad_frame", f"the store answered {reply.TYPE}")
    return reply


def run(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a command's coroutine; an unreachable system becomes a message and exit code 1."""
    try:
        return asyncio.run(work())
    except NothingRunningError:
        fail("nothing is running; start it with ./triptych up")
    except (TriptychError, OSError) as error:
        fail(str(error))
    return 1
