"""A connection from another agent, as the event loop sees it."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from triptych_cache_store.fabric.local_store import LocalStore
from triptych_cache_store.fabric.metrics import FabricMetrics
from triptych_cache_store.fabric.target.byte_budget import ByteBudget
from triptych_cache_store.fabric.target.inbox import EntryInbox, Sink
from triptych_cache_store.fabric.target.reception import Reception
from triptych_cache_store.fabric.target.written_chunks import WrittenChunks
from triptych_cache_store.fabric.wire.channel import FabricChannel
from triptych_cache_store.fabric.wire.connection import FabricConnection
from triptych_cache_store.fabric.wire.frames import FrameKind, Offer, OfferFailed
from triptych_cache_store.fabric.wire.handshake import (
    Admitted,
    Identity,
    LinkRefusedError,
    admit_source,
)
from triptych_cache_store.fabric.wire.keys import Credentials
from triptych_cache_store.fabric.wire.nixl_memory import NixlMemory
from triptych_common.domain.errors import MalformedMessageError, TriptychError
from triptych_common.protocol.messages import FabricTransport
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_common.telemetry.logs import get_logger
from triptych_common.telemetry.tracing import span

log = get_logger(__name__)


class FabricPeer:
    """Connection of one source; `source` is None until the handshake has proved who it is."""

    def __init__(
        self,
        channel: FabricChannel,
        own: Identity,
        credentials: Credentials,
        store: LocalStore,
        budget: ByteBudget,
        metrics: FabricMetrics,
        group: asyncio.TaskGroup,
        progress_timeout_s: float,
        on_closed: Callable[["FabricPeer"], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.source: str | None = None
        self._transport = FabricTransport.TCP
        self.closed: asyncio.Future[None] = loop.create_future()
        self._own = own
        self._store = store
        self._budget = budget
        self._metrics = metrics
        self._group = group
        self._progress_timeout_s = progress_timeout_s
        self._on_closed = on_closed
        self._receptions: dict[int, Reception] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        deadline = time.monotonic() + progress_timeout_s

        def admit(taken: FabricChannel) -> Admitted:
            return admit_source(taken, own, credentials, deadline)

        def open_chunks() -> WrittenChunks:
            return WrittenChunks(NixlMemory.open(store.mapping), progress_timeout_s)

        self._inbox = EntryInbox(admit, self, store.mapping, loop, open_chunks)
        self._connection = FabricConnection("fabric peer", channel, self._inbox, progress_timeout_s)
        self._connection.start()

    async def wait_idle(self) -> None:
        """Return when the peer has no entry under way."""
        await self._idle.wait()

    def close(self) -> None:
        """Close the connection; `closed` resolves later."""
        self._connection.stop()

    # ---- for receptions --------------------------------------------------------------------------
    def accept(self, number: int, sink: Sink) -> None:
        self._connection.post(lambda: self._inbox.accept(number, sink))

    def answer(self, number: int, kind: FrameKind) -> None:
        self._connection.post(lambda: self._inbox.answer(number, kind))

    async def drop(self, number: int, failure: OfferFailed) -> None:
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection.post(lambda: self._inbox.drop(number, failure, partial(_resolve, gone)))
        ends = {gone, self.closed}
        await asyncio.wait(ends, timeout=self._progress_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():  # it reads nothing: steps wait for what is being sent to it
            self.close()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)

    # ---- events of its thread --------------------------------------------------------------------
    def on_admitted(self, admitted: Admitted) -> None:
        if admitted.generation != self._own.generation:  # the store was restarted meanwhile
            self.close()
            return
        self.source = admitted.source
        self._transport = admitted.transport
        log.info("fabric peer connected", source=self.source, transport=self._transport.value)

    def on_offer(self, number: int, offer: Offer) -> None:
        reception = Reception(number, offer, self._store, self._budget, self)
        self._receptions[number] = reception
        self._idle.clear()
        if self.closed.done():
            reception.on_withdrawn()
        self._group.create_task(self._run(reception))

    def on_began(self, number: int) -> None:
        if (reception := self._receptions.get(number)) is not None:
            reception.on_began()

    def on_received(self, number: int, is_intact: bool) -> None:
        if (reception := self._receptions.get(number)) is not None:
            reception.on_received(is_intact)

    def on_withdrawn(self, number: int) -> None:
        if (reception := self._receptions.get(number)) is not None:
            reception.on_withdrawn()

    def on_closed(self, error: TriptychError | None) -> None:
        self._connection.join(1.0)  # this was the last it did
        self.closed.set_result(None)
        for reception in list(self._receptions.values()):
            reception.on_withdrawn()
        if isinstance(error, LinkRefusedError):
            self._metrics.refused.labels(error.reason.value if error.reason else "other").inc()
        if isinstance(error, LinkRefusedError | MalformedMessageError) or self.source is None:
            if error is not None:
                log.warning("fabric peer cut off", source=self.source, error=str(error))
        elif error is not None:
            log.info("fabric peer gone", source=self.source, error=str(error))
        self._on_closed(self)

    async def _run(self, reception: Reception) -> None:
        offer, metrics = reception.offer, self._metrics
        source = metrics.peer(self.source or "")
        attributes: dict[str, str | int] = {
            "triptych.mm_hash": offer.mm_hash,
            "triptych.source": self.source or "",
            "triptych.target": self._store.name,
            "triptych.transport": self._transport.value,
            "triptych.num_bytes": offer.spec.num_bytes,
        }
        try:
            if self._own.is_draining:
                failure = OfferFailed(kind=TransferFailureKind.UNREACHABLE, detail="it is draining")
                await self.drop(reception.number, failure)
                outcome = failure.kind.value
            else:
                with span("fabric.receive", traceparent=offer.traceparent, attributes=attributes) as recorded:
                    outcome = await reception.run()
                    recorded.set_attribute("triptych.outcome", outcome)
        except Exception:  # not even given back; it costs the connection, not the agent
            log.exception("fabric offer failed", mm_hash=offer.mm_hash)
            self.close()
            return
        finally:
            del self._receptions[reception.number]
            if not self._receptions:
                self._idle.set()
        metrics.receptions.labels(outcome, source).inc()
        if outcome == "sealed":
            metrics.received_bytes.labels(source, self._transport.value).inc(offer.spec.num_bytes)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
