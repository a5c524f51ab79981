"""Links to receivers' agents, one per receiver, opened when a push needs one; the registry has the address.

After a failure the next common transport is used (`TransportChoice`). A link by a better transport replaces
an open one after a while; entries under way stay on the link they began on.
"""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from triptych_common.domain.errors import BusUnavailableError, MalformedMessageError
from triptych_common.protocol.messages import FabricEndpoint, FabricTransport, InstanceRecord
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_common.telemetry.logs import get_logger
from triptych_fabric.sender.link import OutgoingLink
from triptych_fabric.transports.transport import RateLimit, Transport
from triptych_fabric.wire.channel import ChannelError, FabricChannel
from triptych_fabric.wire.frames import EntryFailedError
from triptych_fabric.wire.handshake import LinkRefusedError, RefusalReason, greet_receiver
from triptych_fabric.wire.keys import Credentials

log = get_logger(__name__)

AVOID_S = 60.0
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
# Refusals of an agent whose record is outdated, or is about to be.
PASSING_REFUSALS = (RefusalReason.STORE, RefusalReason.TRANSPORT, RefusalReason.BUSY)
Incarnation = tuple[str, int]
"""Boot id of a receiver's agent, and its store's generation."""
FindAgent = Callable[[str], Awaitable[InstanceRecord | None]]
"""Finds the registered agent of a store; None if there is none. Raises BusUnavailableError."""


def incarnation_of(agent: InstanceRecord) -> Incarnation:
    return agent.boot_id, 0 if agent.fabric is None else agent.fabric.generation


class TransportChoice:
    """Choice of a link's transport: the best that both agents have and that has not just failed. Pure.

    A link that fails counts against its transport for `AVOID_S`, for that incarnation of the receiver's
    agent. The cause (network, peer or transport) does not matter. `now` is in monotonic seconds.
    """

    def __init__(self, transports: Sequence[FabricTransport]) -> None:
        """`transports` are ordered best first."""
        self._transports = tuple(transports)
        self._failed_at: dict[tuple[Incarnation, FabricTransport], float] = {}

    def choose(self, agent: InstanceRecord, now: float) -> FabricTransport | None:
        """Best transport that has not just failed, else the one that failed first; None if none is common."""
        # `min` takes the first of equals.
        return min(self._common(agent), key=lambda each: self._avoided_since(agent, each, now), default=None)

    def num_left(self, agent: InstanceRecord, now: float) -> int:
        """Number of common transports that have not just failed."""
        return sum(self._avoided_since(agent, each, now) < 0 for each in self._common(agent))

    def on_failed(self, incarnation: Incarnation, transport: FabricTransport, now: float) -> None:
        recent = {key: at for key, at in self._failed_at.items() if now - at < AVOID_S}
        self._failed_at = recent | {(incarnation, transport): now}

    def is_better(self, transport: FabricTransport, other: FabricTransport) -> bool:
        return self._transports.index(transport) < self._transports.index(other)

    def _common(self, agent: InstanceRecord) -> list[FabricTransport]:
        theirs = () if agent.fabric is None else agent.fabric.transports
        return [each for each in self._transports if each in theirs]

    def _avoided_since(self, agent: InstanceRecord, transport: FabricTransport, now: float) -> float:
        """Time of a failure that still counts; negative if there is none."""
        failed_at = self._failed_at.get((incarnation_of(agent), transport), -1.0)
        return failed_at if now - failed_at < AVOID_S else -1.0


class OutgoingLinks:
    """Links by receiver, for one event loop; one not reached in `progress_timeout_s` is unreachable."""

    def __init__(
        self,
        own_store: str,
        find_agent: FindAgent,
        transports: Mapping[FabricTransport, Transport],
        credentials: Credentials,
        rate: RateLimit,
        progress_timeout_s: float,
    ) -> None:
        """`transports` are ordered best first."""
        self._own_store = own_store
        self._find_agent = find_agent
        self._transports = transports
        self._choice = TransportChoice(tuple(transports))
        self._credentials = credentials
        self._rate = rate
        self._progress_timeout_s = progress_timeout_s
        self._links: dict[str, OutgoingLink] = {}
        self._dialling: dict[str, asyncio.Task[OutgoingLink]] = {}
        self._known: dict[str, InstanceRecord] = {}  # last records seen, while Redis is away
        self._all: set[OutgoingLink] = set()

    def num_up(self, transport: FabricTransport) -> int:
        return sum(link.is_open and link.transport is transport for link in self._all)

    def transport_to(self, receiver: str) -> FabricTransport:
        """Transport of the open link, or of the link that would be opened."""
        link = self._links.get(receiver)
        return link.transport if link is not None else self._choose(receiver) or next(iter(self._transports))

    def has_other_way(self, receiver: str) -> bool:
        """True if a transport to the receiver is left that has not just failed."""
        known = self._known.get(receiver)
        return known is not None and self._choice.num_left(known, time.monotonic()) > 0

    def offers_by_receiver(self) -> dict[str, int]:
        """Number of entries under way to each receiver with an open link."""
        found = Counter({receiver: 0 for receiver, link in self._links.items() if link.is_open})
        for link in self._all:  # also on a link that another has replaced
            if link.is_open:
                found[link.receiver] += link.num_offers
        return found

    async def connected(self, receiver: str) -> OutgoingLink:
        """Open link to the agent of `receiver`. Raises EntryFailedError: unreachable, or refused."""
        link = self._open_link(receiver)
        if link is None:
            return await asyncio.shield(self._start_dialling(receiver))
        chosen = self._choose(receiver)
        if chosen is not None and self._choice.is_better(chosen, link.transport):
            self._start_dialling(receiver)  # no push waits for it
        return link

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

    def _open_link(self, receiver: str) -> OutgoingLink | None:
        link = self._links.get(receiver)
        return link if link is not None and link.is_open else None

    def _choose(self, receiver: str) -> FabricTransport | None:
        """Transport by the receiver's most recent registry record."""
        known = self._known.get(receiver)
        return None if known is None else self._choice.choose(known, time.monotonic())

    def _start_dialling(self, receiver: str) -> "asyncio.Task[OutgoingLink]":
        task = self._dialling.get(receiver)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._dial(receiver), name=f"dial {receiver}")
            self._dialling[receiver] = task
            task.add_done_callback(partial(self._on_dialled, receiver))
        return task

    def _on_dialled(self, receiver: str, task: "asyncio.Task[OutgoingLink]") -> None:
        del self._dialling[receiver]
        if not task.cancelled() and task.exception() is None:
            earlier, self._links[receiver] = self._links.get(receiver), task.result()
            if earlier is not None and earlier is not task.result():
                earlier.close_when_idle()

    def _on_closed(self, incarnation: Incarnation, link: OutgoingLink) -> None:
        self._all.discard(link)
        if link.is_lost:
            self._choice.on_failed(incarnation, link.transport, time.monotonic())
        if self._links.get(link.receiver) is link:
            del self._links[link.receiver]

    async def _dial(self, receiver: str) -> OutgoingLink:
        until = time.monotonic() + self._progress_timeout_s
        retry_s = FIRST_RETRY_S
        failure = EntryFailedError(TransferFailureKind.UNREACHABLE, "the receiver's agent is not registered")
        while True:
            agent = await self._agent(receiver)
            if agent is not None and agent.fabric is not None:
                transport = self._choice.choose(agent, time.monotonic())
                if transport is None:
                    failure = EntryFailedError(
                        TransferFailureKind.REFUSED, "the two agents have no transport in common"
                    )
                    break
                link = self._open_link(receiver)  # then a better one is tried
                if link is not None and not self._choice.is_better(transport, link.transport):
                    return link
                try:
                    return await self._open(receiver, agent, agent.fabric, transport, until)
                except EntryFailedError as failed:
                    failure = failed
                if failure.kind is TransferFailureKind.REFUSED:
                    break
                now = time.monotonic()
                self._choice.on_failed(incarnation_of(agent), transport, now)
                if self._choice.num_left(agent, now):
                    log.warning(
                        "fabric transport failed, the next one is tried",
                        target=receiver,
                        transport=transport.value,
                        error=failure.detail,
                    )
                    until = now + self._progress_timeout_s  # each transport has as long
                    continue
            if time.monotonic() + retry_s > until:
                break
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)
        log.warning("fabric target not reached", target=receiver, error=str(failure))
        raise failure

    async def _agent(self, receiver: str) -> InstanceRecord | None:
        try:
            found = await self._find_agent(receiver)
        except BusUnavailableError:
            return self._known.get(receiver)
        if found is None:
            self._known.pop(receiver, None)
        else:
            self._known[receiver] = found
        return found

    async def _open(
        self,
        receiver: str,
        agent: InstanceRecord,
        endpoint: FabricEndpoint,
        transport: FabricTransport,
        until: float,
    ) -> OutgoingLink:
        """Open a link; raises EntryFailedError on failure."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                channel = FabricChannel(await _connect(endpoint))
                greet = partial(
                    greet_receiver,
                    sender=self._own_store,
                    receiver=receiver,
                    generation=endpoint.generation,
                    credentials=self._credentials,
                    deadline=until,
                    transport=transport,
                )
                link = OutgoingLink(
                    receiver,
                    self._transports[transport],
                    channel,
                    greet,
                    self._rate,
                    self._progress_timeout_s,
                    partial(self._on_closed, incarnation_of(agent)),
                )
                self._all.add(link)
                try:
                    await asyncio.shield(link.opened)
                except BaseException:
                    link.close()
                    raise
                return link
        except LinkRefusedError as refused:
            is_passing = refused.reason in PASSING_REFUSALS
            kind = TransferFailureKind.UNREACHABLE if is_passing else TransferFailureKind.REFUSED
            raise EntryFailedError(kind, str(refused)) from refused
        except (ChannelError, MalformedMessageError, OSError) as error:  # TimeoutError is one
            # Without the address, which gateways must not learn.
            text = error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
            raise EntryFailedError(TransferFailureKind.UNREACHABLE, f"not reached: {text}") from error


async def _connect(endpoint: FabricEndpoint) -> socket.socket:
    loop = asyncio.get_running_loop()
    error = OSError("it has no address")
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
    raise error
