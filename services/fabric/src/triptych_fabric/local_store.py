"""The agent's session with its own store, and its mapping of the region.

At the sender it holds entries: a pin, or a watch that becomes one, shared by all pushes of an entry. At the
receiver it reserves and seals, as the writer of its own reservations. A reply that comes late, or to a
cancelled task, is undone: nothing stays held.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from triptych_common.domain.errors import StoreProtocolError, StoreUnavailableError, store_error
from triptych_common.protocol.store import (
    AlreadySealed,
    Cancel,
    Descriptor,
    Done,
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
    StoreFrame,
    StoreReply,
    StoreStats,
    TensorSpec,
    Unpin,
    Unwatch,
    Watching,
    WriterLost,
)
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_common.region.mapping import RegionMapping
from triptych_common.store_session import AsyncStoreSession, Push, request_within, submit_final
from triptych_fabric.wire.connection import resolve
from triptych_fabric.wire.frames import EntryFailedError

RECONNECT_S = 60.0  # a store that restarts within that time finds everything held as before
REQUEST_TIMEOUT_S = 10.0
Reply = TypeVar("Reply", bound=StoreFrame)


def _absent() -> EntryFailedError:
    detail = "the store does not have the entry, and nobody writes it"
    return EntryFailedError(TransferFailureKind.ABSENT, detail)


class EntryHold:
    """Hold on an entry: a pin, or a watch until the pin comes."""

    def __init__(self, mm_hash: str) -> None:
        loop = asyncio.get_running_loop()
        self.mm_hash = mm_hash
        self.answered: asyncio.Future[None] = loop.create_future()  # the store has answered
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
    async def connect(cls, socket: Path, instance: str, *, on_changed: Callable[[], None]) -> "LocalStore":
        """Connect. `on_changed` is called when the store restarted (holds are restored) or is gone for good.

        Raises:
            StoreError: there is no store, or it refuses us, or its region cannot be mapped.
        """
        made: list[LocalStore] = []  # empty until connected

        def on_push(push: Push) -> None:
            for store in made:
                store.on_push(push)

        def on_lost(error: Exception | None) -> None:
            for store in made:
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
        made.append(cls(session, mapping))
        return made[0]

    async def close(self) -> None:
        await self._session.close()
        self.mapping.close()

    @property
    def name(self) -> str:
        return self._session.welcome.store

    @property
    def generation(self) -> int:
        return self._session.welcome.generation

    # ---- at the sender ---------------------------------------------------------------------------
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
            hold.fail(_absent())
            if hold.mm_hash not in self._holds:  # otherwise the store's watch belongs to a later hold
                self._submit(Unwatch(seq=0, mm_hash=hold.mm_hash))

    async def stats(self) -> StoreStats:
        """Statistics of the agent's own store; raises StoreError."""
        return await self._request(StatsQuery(seq=0), StoreStats)

    async def find_spec(self, mm_hash: str) -> TensorSpec | None:
        """Shape and dtype of the entry, also while it is being written; raises StoreError."""
        reply = await self._request(Lookup(seq=0, mm_hashes=(mm_hash,)), Entries)
        return reply.entries[0].spec if reply.entries else None

    def on_push(self, push: Push) -> None:
        match push:
            case EntrySealed():
                hold = self._holds.get(push.descriptor.mm_hash)
                if hold is None or not hold.set_pin(push.pin_id, push.descriptor):
                    self._submit(Unpin(seq=0, pin_id=push.pin_id))
            case WriterLost():
                if (hold := self._holds.pop(push.mm_hash, None)) is not None:
                    detail = "the writer went away before the seal"
                    hold.fail(EntryFailedError(TransferFailureKind.WRITER_LOST, detail))

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
                    self._forget(hold, _absent())
                case StoreFailure() as failure:
                    self._forget(hold, store_error(failure))
                case other:
                    self._forget(hold, StoreProtocolError("bad_frame", f"the store answered {other.kind!r}"))
        resolve(hold.answered)

    def _forget(self, hold: EntryHold, error: Exception) -> None:
        """Fail the hold, so that later pushes ask the store again."""
        if self._holds.get(hold.mm_hash) is hold:
            del self._holds[hold.mm_hash]
        hold.fail(error)

    # ---- at the receiver -------------------------------------------------------------------------
    async def reserve(self, mm_hash: str, spec: TensorSpec) -> Reserved | AlreadySealed:
        """Reserve blocks for this process to write, unless the entry is sealed already.

        Raises:
            StoreFullError: there is no room now.
            StoreError: the store refuses, or does not answer in time.
        """
        return await self._request(Reserve(seq=0, mm_hash=mm_hash, spec=spec), Reserved, AlreadySealed)

    async def seal(self, reservation_id: int) -> None:
        """Seal the reservation; raises StoreError if the store refuses or does not answer in time."""
        await self._request(Seal(seq=0, reservation_id=reservation_id), Done)

    def cancel(self, reservation_id: int) -> None:
        self._submit(Cancel(seq=0, reservation_id=reservation_id))

    # ---- commands --------------------------------------------------------------------------------
    async def _request(self, command: StoreCommand, *replies: type[Reply]) -> Reply:
        return await request_within(self._session, command, REQUEST_TIMEOUT_S, self._undo, *replies)

    def _undo(self, reply: StoreReply) -> None:
        if isinstance(reply, Reserved):
            self.cancel(reply.reservation_id)

    def _submit(self, command: StoreCommand) -> None:
        submit_final(self._session, command)
