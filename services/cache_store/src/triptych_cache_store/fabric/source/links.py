"""Links to targets' agents, one per target, opened when a push needs one; the registry has the address.

After a failure the next common transport is used (`TransportChoice`). A link by a better transport replaces
an open one after a while; entries under way stay on the link they began on.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from triptych_cache_store.fabric.source.byte_turns import RateLimit
from triptych_cache_store.fabric.source.dialing import LinkDialer
from triptych_cache_store.fabric.source.link import PushFailedError, TargetLink
from triptych_cache_store.fabric.source.region_writes import RegionWrites
from triptych_cache_store.fabric.source.transport_choice import Life, TransportChoice, life_of
from triptych_cache_store.fabric.wire.channel import ChannelError
from triptych_cache_store.fabric.wire.handshake import LinkRefusedError, RefusalReason, greet_target
from triptych_cache_store.fabric.wire.keys import Credentials
from triptych_cache_store.fabric.wire.nixl_memory import NixlMemory
from triptych_common.domain.errors import BusUnavailableError, MalformedMessageError
from triptych_common.protocol.messages import FabricTransport, InstanceRecord
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_common.region.mapping import RegionMapping
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
OF_AN_OLD_RECORD = (RefusalReason.STORE, RefusalReason.TRANSPORT, RefusalReason.BUSY)  # or one about to go
FindAgent = Callable[[str], Awaitable[InstanceRecord | None]]
"""Finds the registered agent of a store; None if there is none. Raises BusUnavailableError."""


class TargetLinks:
    """Links by target, for one event loop; a target not reached in `progress_timeout_s` is unreachable."""

    def __init__(
        self,
        own_store: str,
        find_agent: FindAgent,
        dialer: LinkDialer,
        choice: TransportChoice,
        credentials: Credentials,
        rate: RateLimit,
        progress_timeout_s: float,
        mapping: RegionMapping,
    ) -> None:
        self._own_store = own_store
        self._find_agent = find_agent
        self._dialer = dialer
        self._choice = choice
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
        """Transport of the open link, or of the link that would be opened."""
        link = self._links.get(target)
        return link.transport if link is not None else self._choose(target) or self._choice.best

    def has_other_way(self, target: str) -> bool:
        """True if a transport to the target is left that has not just failed."""
        known = self._known.get(target)
        return known is not None and self._choice.num_left(target, known, time.monotonic()) > 0

    def offers_by_target(self) -> dict[str, int]:
        """Number of entries under way to each target with an open link."""
        found = Counter({target: 0 for target, link in self._links.items() if link.is_open})
        for link in self._all:  # also on one whose place another has taken
            if link.is_open:
                found[link.target] += link.num_offers
        return found

    async def connected(self, target: str) -> TargetLink:
        """Open link to the agent of `target`.

        Raises:
            PushFailedError: unreachable, or refused.
        """
        link = self._open_link(target)
        if link is not None:
            if self._has_better(link):
                self._start_dialling(target)
            return link
        return await asyncio.shield(self._start_dialling(target))

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

    def _open_link(self, target: str) -> TargetLink | None:
        link = self._links.get(target)
        return link if link is not None and link.is_open else None

    def _has_better(self, link: TargetLink) -> bool:
        chosen = self._choose(link.target)
        return chosen is not None and self._choice.is_better(chosen, link.transport)

    def _choose(self, target: str) -> FabricTransport | None:
        """Transport by the target's most recent registry record."""
        known = self._known.get(target)
        return None if known is None else self._choice.choose(target, known, time.monotonic())

    def _start_dialling(self, target: str) -> "asyncio.Task[TargetLink]":
        task = self._dialling.get(target)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._dial(target), name=f"dial {target}")
            self._dialling[target] = task
            task.add_done_callback(partial(self._on_dialled, target))
        return task

    def _on_dialled(self, target: str, task: "asyncio.Task[TargetLink]") -> None:
        del self._dialling[target]
        if not task.cancelled() and task.exception() is None:
            earlier, self._links[target] = self._links.get(target), task.result()
            if earlier is not None and earlier is not task.result():
                earlier.close_when_idle()

    def _on_closed(self, life: Life, link: TargetLink) -> None:
        self._all.discard(link)
        if link.is_lost:
            self._choice.on_failed(link.target, life, link.transport, time.monotonic())
        if self._links.get(link.target) is link:
            del self._links[link.target]

    async def _dial(self, target: str) -> TargetLink:
        until = time.monotonic() + self._progress_timeout_s
        retry_s = FIRST_RETRY_S
        while True:
            failure = PushFailedError(TransferFailureKind.UNREACHABLE, "the target's agent is not registered")
            agent = await self._agent(target)
            if agent is not None:
                transport = self._choice.choose(target, agent, time.monotonic())
                if transport is None:
                    detail = "the two agents have no transport in common"
                    raise _logged(target, PushFailedError(TransferFailureKind.REFUSED, detail))
                link = self._open_link(target)  # then a better one is tried
                if link is not None and not self._choice.is_better(transport, link.transport):
                    return link
                try:
                    return await self._open(target, agent, transport, until)
                except PushFailedError as failed:
                    failure = failed
                if failure.kind is TransferFailureKind.REFUSED:
                    raise _logged(target, failure)
                now = time.monotonic()
                self._choice.on_failed(target, life_of(agent), transport, now)
                if self._choice.num_left(target, agent, now):
                    log.warning(
                        "fabric transport failed, the next one is tried",
                        target=target,
                        transport=transport.value,
                        error=failure.detail,
                    )
                    until = now + self._progress_timeout_s  # which each of them has
                    continue
            if time.monotonic() + retry_s > until:
                raise _logged(target, failure)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    def _open_writes(self) -> RegionWrites:
        """Open NIXL's writes, in the link's thread."""
        return RegionWrites(NixlMemory.open(self._mapping), self._progress_timeout_s)

    async def _agent(self, target: str) -> InstanceRecord | None:
        try:
            found = await self._find_agent(target)
        except BusUnavailableError:
            return self._known.get(target)
        if found is None:
            self._known.pop(target, None)
            self._choice.forget(target)
        else:
            self._known[target] = found
        return found

    async def _open(
        self, target: str, agent: InstanceRecord, transport: FabricTransport, until: float
    ) -> TargetLink:
        """Open a link; raises PushFailedError on failure."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                return await self._opened(target, agent, transport, until)
        except LinkRefusedError as refused:
            is_passing = refused.reason in OF_AN_OLD_RECORD
            kind = TransferFailureKind.UNREACHABLE if is_passing else TransferFailureKind.REFUSED
            raise PushFailedError(kind, str(refused)) from refused
        except BusUnavailableError as error:
            detail = "not reached: Redis was lost"
            raise PushFailedError(TransferFailureKind.UNREACHABLE, detail) from error
        except (ChannelError, MalformedMessageError, OSError) as error:  # TimeoutError is one
            detail = f"not reached: {_text(error)}"
            raise PushFailedError(TransferFailureKind.UNREACHABLE, detail) from error

    async def _opened(
        self, target: str, agent: InstanceRecord, transport: FabricTransport, until: float
    ) -> TargetLink:
        endpoint = agent.fabric
        if endpoint is None:
            raise PushFailedError(TransferFailureKind.REFUSED, "it is no agent of a store")
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
            partial(self._on_closed, life_of(agent)),
            self._open_writes if transport is FabricTransport.NIXL else None,
        )
        self._all.add(link)
        try:
            await asyncio.shield(link.opened)
        except BaseException:
            link.close()
            raise
        return link


def _logged(target: str, failure: PushFailedError) -> PushFailedError:
    log.warning("fabric target not reached", target=target, error=str(failure))
    return failure


def _text(error: BaseException) -> str:
    """Text of the error without the address, which gateways must not learn."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)
