"""One link to each target's agent, made when a push needs it. The registry says where that agent is."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from triptych_cache_store.fabric.source.byte_turns import RateLimit
from triptych_cache_store.fabric.source.dialing import LinkDialer
from triptych_cache_store.fabric.source.link import PushFailedError, TargetLink
from triptych_cache_store.fabric.source.region_writes import RegionWrites
from triptych_cache_store.fabric.wire.channel import ChannelError
from triptych_cache_store.fabric.wire.handshake import LinkRefusedError, RefusalReason, greet_target
from triptych_cache_store.fabric.wire.keys import Credentials
from triptych_cache_store.fabric.wire.nixl_memory import NixlMemory
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import FabricTransport, InstanceRecord
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_common.region.mapping import RegionMapping
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
OF_AN_OLD_RECORD = (RefusalReason.STORE, RefusalReason.TRANSPORT, RefusalReason.BUSY)  # or one about to go
FindAgent = Callable[[str], Awaitable[InstanceRecord | None]]
"""A store's agent as it is registered now; None: there is none. Raises BusUnavailableError."""


class TargetLinks:
    """For one event loop. A target that was not reached for `progress_timeout_s` is unreachable."""

    def __init__(
        self,
        own_store: str,
        find_agent: FindAgent,
        dialer: LinkDialer,
        credentials: Credentials,
        rate: RateLimit,
        progress_timeout_s: float,
        mapping: RegionMapping,
    ) -> None:
        self._own_store = own_store
        self._find_agent = find_agent
        self._dialer = dialer
        self._credentials = credentials
        self._rate = rate
        self._progress_timeout_s = progress_timeout_s
        self._mapping = mapping
        self._links: dict[str, TargetLink] = {}
        self._dialling: dict[str, asyncio.Task[TargetLink]] = {}
        self._known: dict[str, InstanceRecord] = {}  # as they were last seen, while Redis is away
        self._all: set[TargetLink] = set()

    def num_up(self, transport: FabricTransport) -> int:
        return sum(link.is_open and link.transport is transport for link in self._all)

    def transport_to(self, target: str) -> FabricTransport:
        """Of the link that is up, or would be made."""
        link, known = self._links.get(target), self._known.get(target)
        if link is not None:
            return link.transport
        chosen = None if known is None or known.fabric is None else self._dialer.choose(known.fabric)
        return chosen or self._dialer.transports[0]

    def offers_by_target(self) -> dict[str, int]:
        """Of the links that are up: how many entries are under way to each target."""
        return {target: link.num_offers for target, link in self._links.items() if link.is_open}

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
            agent = await self._agent(target)
            if agent is not None:
                try:
                    async with asyncio.timeout_at(
                        asyncio.get_running_loop().time() + until - time.monotonic()
                    ):
                        return await self._open(target, agent, until)
                except PushFailedError as failed:
                    failure = failed
                except LinkRefusedError as refused:
                    kind = TransferFailureKind.REFUSED
                    if refused.reason in OF_AN_OLD_RECORD:
                        kind = TransferFailureKind.UNREACHABLE
                    failure = PushFailedError(kind, str(refused))
                except BusUnavailableError:
                    failure = PushFailedError(TransferFailureKind.UNREACHABLE, "not reached: Redis was lost")
                except (ChannelError, OSError) as error:  # TimeoutError is one
                    failure = PushFailedError(TransferFailureKind.UNREACHABLE, f"not reached: {_text(error)}")
            if failure.kind is TransferFailureKind.REFUSED or time.monotonic() + retry_s > until:
                log.warning("fabric target not reached", target=target, error=str(failure))
                raise failure
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    def _open_writes(self) -> RegionWrites:
        """By the thread of a link."""
        return RegionWrites(NixlMemory.open(self._mapping), self._progress_timeout_s)

    async def _agent(self, target: str) -> InstanceRecord | None:
        try:
            found = await self._find_agent(target)
        except BusUnavailableError:
            return self._known.get(target)
        if found is None:
            self._known.pop(target, None)
        else:
            self._known[target] = found
        return found

    async def _open(self, target: str, agent: InstanceRecord, until: float) -> TargetLink:
        endpoint = agent.fabric
        transport = None if endpoint is None else self._dialer.choose(endpoint)
        if endpoint is None or transport is None:
            raise PushFailedError(TransferFailureKind.REFUSED, "the two agents have no transport in common")
        channel = await self._dialer.dial(agent.instance, endpoint, transport)
        greet = partial(
            greet_target,
            source=self._own_store,
            target=target,
            generation=endpoint.generation,
            credentials=self._credentials,
            deadline=until,
            transport=transport,
        )
        link = TargetLink(
            target,
            transport,
            channel,
            greet,
            self._rate,
            self._progress_timeout_s,
            self._on_closed,
            self._open_writes if transport is FabricTransport.NIXL else None,
        )
        self._all.add(link)
        try:
            await asyncio.shield(link.opened)
        except BaseException:
            link.close()
            raise
        return link


def _text(error: BaseException) -> str:
    """Without the address."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)
