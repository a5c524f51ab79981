"""The agent's session with its own store, and its mapping of the region.

At the source it holds entries: a pin, or a watch that becomes one, shared by all pushes of an entry. At the
target it reserves and seals, as the writer of its own reservations. A reply that comes late, or to a
cancelled task, is undone: nothing stays held.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from triptych_common.domain.errors import StoreError, StoreProtocolError, StoreUnavailableError, store_error
from triptych_common.protocol.store import (
    AlreadySealed,
    Cancel,
    Descriptor,
    Entries,
    EntrySealed,
    Lookup,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    Seal,
    StatsQuery,
    StoreCommand,
    StoreFailure,
    StoreReply,
    StoreStats,
    TensorSpec,
    Unpin,
    Unwatch,
    Watching,
    WriterLost,
)
from triptych_common.region.mapping import RegionMapping
from triptych_common.store_session import AsyncStoreSession, Push, request_within
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

RECONNECT_S = 60.0  # a store that restarts within that time finds everything held as before
REQUEST_TIMEOUT_S = 10.0


class EntryAbsentError(StoreError):
    """The store does not have the entry, and no client is writing it."""

    def __init__(self) -> None:
        super().__init__("absent", "the store does not have the entry, and nobody writes it")


class EntryWriterLostError(StoreError):
    """The entry's writer ended before its seal."""

    def __init__(self) -> None:
        super().__init__("writer_lost", "the writer went away before the seal")


class EntryHold:
    """Hold on an entry: a pin, or a watch until the pin comes."""

    def __init__(self, mm_hash: str) -> None:
        loop = asyncio.get_running_loop()
        self.mm_hash = mm_hash
        self.answered: asyncio.Future[None] = loop.create_future()  # whether it is sealed is known
        self.sealed: asyncio.Future[Descriptor] = loop.create_future()
        self.num_users = 0
        self.pin_id: int | None = None

    def set_pin(self, pin_id: int, descriptor: Descriptor) -> bool:
        """Set the pin; False if the hold has one or has failed."""
        if self.sealed.done():
            return False
        self.pin_id = pin_id
        self.sealed.set_result(descriptor)
        return True

    def fail(self, error: Exception) -> None:
        if not self.sealed.done():
            self.sealed.set_exception(error)
            self.sealed.exception()  # retrieved: perhaps no push waits for it any more


class LocalStore:
    """Session with the agent's own store; used in one event loop."""

    def __init__(self, session: AsyncStoreSession, mapping: RegionMapping) -> None:
        self._session = session
        self._holds: dict[str, EntryHold] = {}
        self.mapping = mapping
        self.is_lost = False  # the session is over for good

    @classmethod
    async def connect(
        cls,
        socket: Path,
        instance: str,
        *,
        on_changed: Callable[[], None],
    ) -> "LocalStore":
        """Connect. `on_changed` is called when the store restarted (holds are restored) or is gone for good.

        Raises:
            StoreError: there is no store, or it refuses us, or its region cannot be mapped.
        """

        store: LocalStore | None = None  # nothing is called before there is one

        def on_push(push: Push) -> None:
            if store is not None:
                store.on_push(push)

        def on_lost(error: Exception | None) -> None:
            if store is not None:
                store.is_lost = True
                on_changed()

        session = await AsyncStoreSession.connect(
            socket,
            f"{instance}/fabric",
            on_push=on_push,
            on_disconnect=on_lost,
            on_reconnect=lambda welcome: on_changed(),
            reconnect_timeout_s=RECONNECT_S,
        )
        try:
            mapping = RegionMapping.open(session.welcome.region_path, session.welcome.region_num_bytes)
        except BaseException:
            await session.close()
            raise
        store = cls(session, mapping)
        return store

    async def close(self) -> None:
        await self._session.close()
        self.mapping.close()

    @property
    def name(self) -> str:
        return self._session.welcome.store

    @property
    def generation(self) -> int:
        return self._session.welcome.generation

    # ---- at the source ---------------------------------------------------------------------------
    def hold(self, mm_hash: str) -> EntryHold:
        """Pin the entry, or watch it; the caller must `release` the hold."""
        hold = self._holds.get(mm_hash)
        if hold is None:
            hold = self._holds[mm_hash] = EntryHold(mm_hash)
            future = self._session.submit(PinOrWatch(seq=0, mm_hash=mm_hash))
            future.add_done_callback(lambda done: self._on_answer(hold, done))
        hold.num_users += 1
        return hold

    def release(self, hold: EntryHold) -> None:
        """End one use of the hold; the last use unpins or unwatches the entry."""
        hold.num_users -= 1
        if hold.num_users:
            return
        if self._holds.get(hold.mm_hash) is hold:
            del self._holds[hold.mm_hash]
        if hold.pin_id is not None:
            self._submit(Unpin(seq=0, pin_id=hold.pin_id))
        else:
            hold.fail(EntryAbsentError())
            if hold.mm_hash not in self._holds:  # otherwise the store's watch belongs to a later hold
                self._submit(Unwatch(seq=0, mm_hash=hold.mm_hash))

    async def stats(self) -> StoreStats:
        """Statistics of the agent's own store.

        Raises:
            StoreError
        """
        reply = await self._request(StatsQuery(seq=0))
        if not isinstance(reply, StoreStats):
            raise StoreProtocolError("bad_frame", f"the store answered {reply.TYPE}")
        return reply

    async def find_spec(self, mm_hash: str) -> TensorSpec | None:
        """Shape and dtype of the entry, also while it is being written.

        Raises:
            StoreError: the store refuses, or does not answer in time.
        """
        reply = await self._request(Lookup(seq=0, mm_hashes=(mm_hash,)))
        if not isinstance(reply, Entries) or len(reply.entries) != 1:
            raise StoreProtocolError("bad_frame", f"the store answered {reply.kind!r} to lookup")
        return reply.entries[0].spec

    def on_push(self, push: Push) -> None:
        match push:
            case EntrySealed():
                hold = self._holds.get(push.descriptor.mm_hash)
                if hold is None or not hold.set_pin(push.pin_id, push.descriptor):
                    self._submit(Unpin(seq=0, pin_id=push.pin_id))
            case WriterLost():
                if (hold := self._holds.pop(push.mm_hash, None)) is not None:
                    hold.fail(EntryWriterLostError())

    def _on_answer(self, hold: EntryHold, done: "asyncio.Future[StoreReply]") -> None:
        if done.cancelled() or done.exception() is not None:
            hold.fail(StoreUnavailableError("the session with the store ended"))
        else:
            match done.result():
                case Pinned(pin_id=pin_id, descriptor=descriptor):
                    is_current = hold.num_users > 0
                    if not is_current or not hold.set_pin(pin_id, descriptor):
                        self._submit(Unpin(seq=0, pin_id=pin_id))
                case Watching(writing=True):
                    pass
                case Watching():
                    self._forget(hold, EntryAbsentError())
                case StoreFailure() as failure:
                    self._forget(hold, store_error(failure))
                case other:
                    self._forget(hold, StoreProtocolError("bad_frame", f"the store answered {other.kind!r}"))
        if not hold.answered.done():
            hold.answered.set_result(None)

    def _forget(self, hold: EntryHold, error: Exception) -> None:
        """Fail the hold, so that later pushes ask the store again."""
        if self._holds.get(hold.mm_hash) is hold:
            del self._holds[hold.mm_hash]
        hold.fail(error)

    # ---- at the target ---------------------------------------------------------------------------
    async def reserve(self, mm_hash: str, spec: TensorSpec) -> Reserved | AlreadySealed:
        """Reserve blocks for this process to write, unless the entry is sealed already.

        Raises:
            StoreFullError: there is no room now.
            StoreError: the store refuses, or does not answer in time.
        """
        reply = await self._request(Reserve(seq=0, mm_hash=mm_hash, spec=spec))
        if isinstance(reply, Reserved | AlreadySealed):
            return reply
        raise StoreProtocolError("bad_frame", f"the store answered {reply.kind!r} to reserve")

    async def seal(self, reservation_id: int) -> None:
        """Seal the reservation; raises StoreError if the store refuses or does not answer in time."""
        await self._request(Seal(seq=0, reservation_id=reservation_id))

    def cancel(self, reservation_id: int) -> None:
        """Cancel a reservation that this process no longer writes."""
        self._submit(Cancel(seq=0, reservation_id=reservation_id))

    # ---- commands --------------------------------------------------------------------------------
    async def _request(self, command: StoreCommand) -> StoreReply:
        return await request_within(self._session, command, REQUEST_TIMEOUT_S, self._undo)

    def _undo(self, reply: StoreReply) -> None:
        if isinstance(reply, Reserved):
            self.cancel(reply.reservation_id)

    def _submit(self, command: StoreCommand) -> None:
        """Send a command that ends something; if it is lost, the end of the session has the same effect."""
        self._session.submit(command).add_done_callback(_ignore)


def _ignore(future: "asyncio.Future[StoreReply]") -> None:
    if not future.cancelled() and future.exception() is not None:
        log.info("store command not sent", error=str(future.exception()))
