"""One link to each target's agent, made when a push needs it. The registry says where that agent is."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial

from triptych_cache_store.fabric.source.byte_turns import RateLimit
from triptych_cache_store.fabric.source.link import PushFailedError, TargetLink
from triptych_cache_store.fabric.wire.channel import ChannelError, FabricChannel
from triptych_cache_store.fabric.wire.handshake import LinkRefusedError, RefusalReason, greet_target
from triptych_cache_store.fabric.wire.keys import Credentials
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import FabricEndpoint
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
FindEndpoint = Callable[[str], Awaitable[FabricEndpoint | None]]
"""Of a store's agent as it is registered now; None: there is none. Raises BusUnavailableError."""


class TargetLinks:
    """For one event loop. A target that was not reached for `progress_timeout_s` is unreachable."""

    def __init__(
        self,
        own_store: str,
        find_endpoint: FindEndpoint,
        credentials: Credentials,
        rate: RateLimit,
        progress_timeout_s: float,
    ) -> None:
        self._own_store = own_store
        self._find_endpoint = find_endpoint
        self._credentials = credentials
        self._rate = rate
        self._progress_timeout_s = progress_timeout_s
        self._links: dict[str, TargetLink] = {}
        self._dialling: dict[str, asyncio.Task[TargetLink]] = {}
        self._known: dict[str, FabricEndpoint] = {}  # as they were last seen, while Redis is away
        self._all: set[TargetLink] = set()

    @property
    def num_up(self) -> int:
        return sum(link.is_open for link in self._all)

    async def connected(self, target: str) -> TargetLink:
        """A link to the agent of `target`.

        Raises:
            PushFailedError: unreachable, or refused.
        """
        link = self._links.get(target)
        if link is not None and link.is_open:
            return link
        task = self._dialling.get(target)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._dial(target), name=f"dial {target}")
            self._dialling[target] = task
            task.add_done_callback(partial(self._on_dialled, target))
        return await asyncio.shield(task)

    async def close(self) -> None:
        dialling = list(self._dialling.values())
        for task in dialling:
            task.cancel()
        await asyncio.gather(*dialling, return_exceptions=True)
        links = list(self._all)
        for link in links:
            link.close()
        if links:
            await asyncio.wait([link.closed for link in links], timeout=self._progress_timeout_s)

    def _on_dialled(self, target: str, task: "asyncio.Task[TargetLink]") -> None:
        del self._dialling[target]
        if not task.cancelled() and task.exception() is None:
            self._links[target] = task.result()

    def _on_closed(self, link: TargetLink) -> None:
        self._all.discard(link)
        if self._links.get(link.target) is link:
            del self._links[link.target]

    async def _dial(self, target: str) -> TargetLink:
        until = time.monotonic() + self._progress_timeout_s
        retry_s = FIRST_RETRY_S
        while True:
            failure = PushFailedError(TransferFailureKind.UNREACHABLE, "the target's agent is not registered")
            endpoint = await self._endpoint(target)
            if endpoint is not None:
                try:
                    async with asyncio.timeout_at(
                        asyncio.get_running_loop().time() + until - time.monotonic()
                    ):
                        return await self._open(target, endpoint, until)
                except LinkRefusedError as refused:
                    kind = TransferFailureKind.REFUSED
                    if refused.reason in (RefusalReason.STORE, RefusalReason.BUSY):
                        kind = TransferFailureKind.UNREACHABLE  # its record is old, or about to go
                    failure = PushFailedError(kind, str(refused))
                except (ChannelError, OSError) as error:  # TimeoutError is one
                    failure = PushFailedError(TransferFailureKind.UNREACHABLE, f"not reached: {_text(error)}")
            if failure.kind is TransferFailureKind.REFUSED or time.monotonic() + retry_s > until:
                log.warning("fabric target not reached", target=target, error=str(failure))
                raise failure
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _endpoint(self, target: str) -> FabricEndpoint | None:
        try:
            found = await self._find_endpoint(target)
        except BusUnavailableError:
            return self._known.get(target)
        if found is None:
            self._known.pop(target, None)
        else:
            self._known[target] = found
        return found

    async def _open(self, target: str, endpoint: FabricEndpoint, until: float) -> TargetLink:
        sock = await _connect(endpoint)
        greet = partial(
            greet_target,
            source=self._own_store,
            target=target,
            generation=endpoint.generation,
            credentials=self._credentials,
            deadline=until,
        )
        link = TargetLink(
            target, FabricChannel(sock), greet, self._rate, self._progress_timeout_s, self._on_closed
        )
        self._all.add(link)
        try:
            await asyncio.shield(link.opened)
        except BaseException:
            link.close()
            raise
        return link


async def _connect(endpoint: FabricEndpoint) -> socket.socket:
    loop = asyncio.get_running_loop()
    error: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
            return sock
        except OSError as refused:
            sock.close()
            error = refused
        except BaseException:
            sock.close()
            raise
    raise error or OSError("it has no address")


def _text(error: BaseException) -> str:
    """Without the address."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)
