"""Store client of the encoder: reserves blocks for the worker, watches, cancels, unpins."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from triptych_common.coordination import Registry
from triptych_common.domain.errors import BusUnavailableError, ItemTooLargeError, StoreError, StoreFullError
from triptych_common.domain.transports import (
    StoreSlab,
    TransportCapabilities,
    choose_memories,
    consumers_of,
    transport_of,
)
from triptych_common.protocol.messages import Transport
from triptych_common.protocol.store import (
    REDIS,
    SHM,
    AlreadySealed,
    Cancel,
    Entries,
    EntrySealed,
    Lookup,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    StoreCommand,
    StoreFrame,
    StoreReply,
    TensorSpec,
    Unpin,
    Unwatch,
    Watching,
    WriterLost,
)
from triptych_common.region.layout import RegionLayout
from triptych_common.store_session import AsyncStoreSession, request_within, submit_final
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import STORE_RECONNECT_S, worker_session_name

log = get_logger(__name__)

REFRESH_INTERVAL_S = 1.0

Expected = TypeVar("Expected", bound=StoreFrame)


class TransportSelector:
    """Consumers of this namespace, as registered `REFRESH_INTERVAL_S` ago at most."""

    def __init__(
        self,
        own: Callable[[], TransportCapabilities],
        namespace_digest: str,
        registry: Registry,
        slab: Callable[[], StoreSlab | None],
        store: str | None = None,
    ) -> None:
        """`own` returns this encoder's offer, which changes with the store's slab; `store` is the store's
        name."""
        self._own = own
        self._namespace_digest = namespace_digest
        self._registry = registry
        self._slab = slab
        self._store = store
        self._consumers: list[TransportCapabilities] = []
        self._refreshed_at = float("-inf")
        self._logged: list[str] = []

    async def memories(self) -> list[str]:
        """Memories best first; the next is used when the store has no room in the one before."""
        own = replace(self._own(), store=self._store)
        has_choice = len(own.transports) > 1 or Transport.CUDA_IPC in own.transports
        if has_choice and time.monotonic() - self._refreshed_at > REFRESH_INTERVAL_S:
            await self._refresh()
        memories = choose_memories(own, self._consumers, self._slab())
        if memories != self._logged:
            self._logged = memories
            log.info("transport chosen", transports=[transport_of(each).value for each in memories])
        return memories

    async def _refresh(self) -> None:
        try:
            records = await self._registry.list_instances()
        except BusUnavailableError as error:
            log.warning("consumers not refreshed from the registry", error=str(error))
            return
        self._refreshed_at = time.monotonic()
        consumers = consumers_of(self._namespace_digest, records)
        self._consumers = [TransportCapabilities.announced(record) for record in consumers]


class StoreClient:
    """One store session of the encoder's host, for one event loop."""

    def __init__(self, instance: str, session: AsyncStoreSession, lost: asyncio.Event) -> None:
        self._writer = worker_session_name(instance)
        self._session = session
        self._pins: dict[str, asyncio.Future[int]] = {}  # by mm_hash: the id of our pin, once it is sealed
        self.lost = lost

    @classmethod
    async def connect(cls, socket: Path, instance: str, digest: str) -> "StoreClient":
        """Connect; raises StoreError if there is no store, or it refuses this client."""
        lost = asyncio.Event()
        session = await AsyncStoreSession.connect(
            socket,
            f"{instance}/host",
            on_push=lambda push: client.on_push(push),  # noqa: PLW0108 -- none comes before a watch
            on_disconnect=lambda error: lost.set(),
            reconnect_timeout_s=STORE_RECONNECT_S,
            namespace_digest=digest,
        )
        client = cls(instance, session, lost)
        return client

    @property
    def store(self) -> str:
        return self._session.welcome.store

    @property
    def slab(self) -> StoreSlab | None:
        return StoreSlab.of_welcome(self._session.welcome)

    def can_hold(self, sizes: Iterable[int], memories: Sequence[str]) -> bool:
        """True if tensors of these `num_bytes` fit `memories` together, were nothing else there."""
        welcome = self._session.welcome
        layout = RegionLayout.fit(welcome.region_num_bytes, welcome.block_num_bytes)
        slab = welcome.slab
        num_blocks = 0
        if slab is not None and slab.memory in memories:
            num_blocks += slab.num_bytes // welcome.block_num_bytes
        if SHM in memories or REDIS in memories:  # either takes blocks of the region
            num_blocks += layout.num_blocks
        return sum(map(layout.num_blocks_for, sizes)) <= num_blocks

    async def find_sealed(self, mm_hashes: Sequence[str], timeout_s: float) -> set[str]:
        """Hashes among these that are sealed now.

        Raises:
            StoreError: the store refuses, or does not answer within `timeout_s` seconds.
        """
        reply = await self._request(Lookup(seq=0, mm_hashes=tuple(mm_hashes)), timeout_s, Entries)
        return {each.mm_hash for each in reply.entries if each.state in ("ready", "pinned")}

    async def reserve_blocks(
        self,
        mm_hash: str,
        spec: TensorSpec,
        *,
        may_use_reserve: bool,
        memories: Sequence[str],
        timeout_s: float,
    ) -> Reserved | AlreadySealed:
        """Reserve blocks for the worker to write, in the first of `memories` that has room.

        Raises:
            StoreFullError: none of them has.
            StoreError: the store refuses, is gone, or does not answer within `timeout_s` seconds.
        """
        command = Reserve(
            seq=0, mm_hash=mm_hash, spec=spec, writer=self._writer, may_use_reserve=may_use_reserve
        )
        for memory in memories[:-1]:
            try:
                return await self._reserve_in(memory, command, timeout_s)
            except (StoreFullError, ItemTooLargeError):
                continue
        return await self._reserve_in(memories[-1], command, timeout_s)

    async def _reserve_in(self, memory: str, command: Reserve, timeout_s: float) -> Reserved | AlreadySealed:
        in_memory = command.model_copy(update={"memory": memory})
        return await self._request(in_memory, timeout_s, Reserved, AlreadySealed)

    async def watch_item(self, mm_hash: str, timeout_s: float) -> "asyncio.Future[int]":
        """Future of this client's pin of the entry, done at once or with the seal.

        Raises:
            StoreError: the store refuses, or does not answer within `timeout_s` seconds.
        """
        future = self._pins.get(mm_hash)
        if future is None:
            future = self._pins[mm_hash] = asyncio.get_running_loop().create_future()
        reply = await self._request(PinOrWatch(seq=0, mm_hash=mm_hash), timeout_s, Pinned, Watching)
        if isinstance(reply, Pinned):
            self._set_pin(mm_hash, reply.pin_id)
        return future

    def unwatch_item(self, mm_hash: str, reservation_id: int | None) -> None:
        """End the watch, once no job waits for the seal and the worker does not write."""
        self._pins.pop(mm_hash, None)
        submit_final(self._session, Unwatch(seq=0, mm_hash=mm_hash))
        if reservation_id is not None:
            self.cancel_reservation(reservation_id)

    def cancel_reservation(self, reservation_id: int) -> None:
        """Cancel blocks into which the worker does not write."""
        command = Cancel(seq=0, reservation_id=reservation_id, is_unwritten=True)
        submit_final(self._session, command)

    async def _request(self, command: StoreCommand, timeout_s: float, *expected: type[Expected]) -> Expected:
        return await request_within(self._session, command, timeout_s, self._undo, *expected)

    def _undo(self, reply: StoreReply) -> None:
        match reply:
            case Reserved(reservation_id=reservation_id):
                self.cancel_reservation(reservation_id)
            case Pinned(pin_id=pin_id):
                self.end_pins([pin_id])

    def end_pins(self, pin_ids: list[int]) -> None:
        """End producer pins; a lost command does no harm, since the end of the session ends them too."""
        for pin_id in pin_ids:
            submit_final(self._session, Unpin(seq=0, pin_id=pin_id))

    async def close(self) -> None:
        await self._session.close()

    def on_push(self, push: EntrySealed | WriterLost) -> None:
        if isinstance(push, EntrySealed):
            self._set_pin(push.descriptor.mm_hash, push.pin_id)
        else:
            future = self._pins.pop(push.mm_hash, None)
            if future is not None and not future.done():
                future.set_exception(
                    StoreError("unknown_reservation", "the writer went away before the seal")
                )
                future.exception()  # retrieved, if no job waits for it any more

    def _set_pin(self, mm_hash: str, pin_id: int) -> None:
        future = self._pins.pop(mm_hash, None)
        if future is None or future.done():
            self.end_pins([pin_id])
        else:
            future.set_result(pin_id)
