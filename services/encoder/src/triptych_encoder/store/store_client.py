"""The encoder's end of the store: reservations for the worker to write, and the producer's pins."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from triptych_common.domain.errors import (
    ItemTooLargeError,
    StoreError,
    StoreFullError,
    StoreProtocolError,
    StoreUnavailableError,
    store_error,
)
from triptych_common.domain.transports import StoreSlab
from triptych_common.protocol.store import (
    SHM,
    AlreadySealed,
    Cancel,
    EntrySealed,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    StoreCommand,
    StoreFailure,
    StoreReply,
    TensorSpec,
    Unpin,
    Unwatch,
    Watching,
    WriterLost,
)
from triptych_common.store_session import AsyncStoreSession
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import STORE_RECONNECT_S, worker_session_name

log = get_logger(__name__)

FIRST_RETRY_S = 0.02
LONGEST_RETRY_S = 0.5


class StoreClient:
    """One store session of the encoder's host. For one event loop."""

    def __init__(self, instance: str) -> None:
        self._writer = worker_session_name(instance)
        self._session: AsyncStoreSession
        self._sealed: dict[str, asyncio.Future[int]] = {}  # mm_hash -> pin id, for who waits for the seal

    @classmethod
    async def connect(
        cls, socket: Path, instance: str, digest: str, on_disconnect: Callable[[Exception | None], None]
    ) -> "StoreClient":
        """Raises StoreError when there is no store, or it refuses us."""
        hand_over = cls(instance)
        hand_over._session = await AsyncStoreSession.connect(
            socket,
            f"{instance}/host",
            on_push=hand_over._on_push,
            on_disconnect=on_disconnect,
            reconnect_timeout_s=STORE_RECONNECT_S,
            namespace_digest=digest,
        )
        return hand_over

    @property
    def store(self) -> str:
        return self._session.welcome.store

    @property
    def slab(self) -> StoreSlab | None:
        return StoreSlab.told_by(self._session.welcome)

    async def reserve(
        self,
        mm_hash: str,
        spec: TensorSpec,
        is_granted: Callable[[], bool],
        on_full: Callable[[], Awaitable[None]],
        timeout_s: float,
        memories: Sequence[str] = (SHM,),
    ) -> Reserved | AlreadySealed:
        """Hold blocks that the worker will write, in the first of `memories` that has room.

        While the last of them is full: tries again, until `timeout_s`.

        `on_full` is awaited each time the store was full: it tells the consumers, whose grant opens the
        store's reserve.

        Raises:
            StoreFullError: no space within `timeout_s` seconds.
            StoreError: the store refuses, or is gone.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        retry_s = FIRST_RETRY_S
        while True:
            command = Reserve(
                seq=0, mm_hash=mm_hash, spec=spec, writer=self._writer, may_use_reserve=is_granted()
            )
            try:
                left_s = max(deadline - loop.time(), FIRST_RETRY_S)
                reply = await self._request_in(memories, command, left_s)
            except StoreFullError:
                await on_full()
                if loop.time() + retry_s >= deadline:
                    raise
                await asyncio.sleep(retry_s)  # backoff: space comes from other processes' pins
                retry_s = min(retry_s * 2, LONGEST_RETRY_S)
                continue
            if isinstance(reply, Reserved | AlreadySealed):
                return reply
            raise StoreProtocolError("bad_frame", f"the store answered {reply.kind!r} to reserve")

    async def _request_in(self, memories: Sequence[str], command: Reserve, timeout_s: float) -> StoreReply:
        for memory in memories[:-1]:
            try:
                return await self._request(command.model_copy(update={"memory": memory}), timeout_s)
            except (StoreFullError, ItemTooLargeError):
                continue
        return await self._request(command.model_copy(update={"memory": memories[-1]}), timeout_s)

    async def watch(self, mm_hash: str, timeout_s: float) -> "asyncio.Future[int]":
        """A future of our pin of the entry: at once if it is sealed, else when it is.

        Raises:
            StoreError: the store refuses, or does not answer within `timeout_s` seconds.
        """
        future = self._sealed.get(mm_hash)
        if future is None:
            future = self._sealed[mm_hash] = asyncio.get_running_loop().create_future()
        reply = await self._request(PinOrWatch(seq=0, mm_hash=mm_hash), timeout_s)
        if isinstance(reply, Pinned):
            self._pinned(mm_hash, reply.pin_id)
        elif not isinstance(reply, Watching):
            raise StoreProtocolError("bad_frame", f"the store answered {reply.kind!r} to pin_or_watch")
        return future

    def give_up(self, mm_hash: str, reservation_id: int | None) -> None:
        """The job failed: nobody of ours waits, and our worker does not write, or not any more."""
        self._sealed.pop(mm_hash, None)
        self._session.submit(Unwatch(seq=0, mm_hash=mm_hash)).add_done_callback(_ignore)
        if reservation_id is not None:
            self.cancel(reservation_id)

    def cancel(self, reservation_id: int) -> None:
        """Nobody of ours writes into these blocks, or not any more."""
        command = Cancel(seq=0, reservation_id=reservation_id, is_unwritten=True)
        self._session.submit(command).add_done_callback(_ignore)

    async def _request(self, command: StoreCommand, timeout_s: float) -> StoreReply:
        """The store's answer, after its restart if need be.

        One that comes too late, or to nobody, is undone: nothing is held by nobody.

        Raises:
            StoreError: the store refused, is gone, or did not answer in time.
        """
        future = self._session.submit(command)
        try:
            await asyncio.wait({future}, timeout=timeout_s)
        finally:
            if not future.done():
                future.add_done_callback(self._undo)
        if not future.done():
            raise StoreUnavailableError(f"no answer in {timeout_s} s", code="timeout")
        reply = future.result()
        if isinstance(reply, StoreFailure):
            raise store_error(reply)
        return reply

    def _undo(self, future: "asyncio.Future[StoreReply]") -> None:
        if future.cancelled() or future.exception() is not None:
            return
        match future.result():
            case Reserved(reservation_id=reservation_id):
                self.cancel(reservation_id)
            case Pinned(pin_id=pin_id):
                self.unpin([pin_id])

    def unpin(self, pin_ids: list[int]) -> None:
        """End producer pins. The store's answer does not matter: its end of the session ends them too."""
        for pin_id in pin_ids:
            self._session.submit(Unpin(seq=0, pin_id=pin_id)).add_done_callback(_ignore)

    async def close(self) -> None:
        await self._session.close()

    def _on_push(self, push: EntrySealed | WriterLost) -> None:
        if isinstance(push, EntrySealed):
            self._pinned(push.descriptor.mm_hash, push.pin_id)
        else:
            future = self._sealed.pop(push.mm_hash, None)
            if future is not None and not future.done():
                future.set_exception(
                    StoreError("unknown_reservation", "the writer went away before the seal")
                )
                future.exception()  # seen here; who waits sees it too

    def _pinned(self, mm_hash: str, pin_id: int) -> None:
        future = self._sealed.pop(mm_hash, None)
        if future is None or future.done():
            self.unpin([pin_id])
        else:
            future.set_result(pin_id)


def _ignore(future: "asyncio.Future[StoreReply]") -> None:
    """An end that the store could not be told of: its end of the session tells it."""
    if not future.cancelled() and future.exception() is not None:
        log.warning("the store was not told", error=str(future.exception()))
