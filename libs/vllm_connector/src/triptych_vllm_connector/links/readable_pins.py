"""Checks that a pinned entry can be read from here, before a request is scheduled with it.

An entry may lie in the memory of a GPU that this instance does not have, or its bytes may be gone from Redis.
Then it is given back, evicted and asked for again: the encoder that makes it anew knows this instance's
transports. Checks that need the network run in a thread.
"""

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from triptych_common.domain.errors import StoreError, TriptychError
from triptych_common.protocol.store import (
    SHM,
    Descriptor,
    EntrySealed,
    Evict,
    Pinned,
    PinOrWatch,
    StoreReply,
    Unpin,
    Unwatch,
    WriterLost,
)
from triptych_common.store_session import StoreSession
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.consumer.ports import PinLink

log = get_logger(__name__)

OnReply = Callable[[str, StoreReply | StoreError], None]
OnPush = Callable[[EntrySealed | WriterLost], None]
Deliver = Callable[[], None]


class StorePins:
    """`PinLink` over a `StoreSession`. `num_ranks` unpins end each pin (one per tensor-parallel rank).

    `on_reply(mm_hash, reply)` is called on the session's thread.
    """

    def __init__(self, session: StoreSession, num_ranks: int, on_reply: OnReply) -> None:
        self._session = session
        self._num_ranks = num_ranks
        self._on_reply = on_reply

    def pin_or_watch(self, mm_hash: str) -> None:
        future = self._session.submit(PinOrWatch(seq=0, mm_hash=mm_hash, num_holders=self._num_ranks))

        def deliver(done: Future[StoreReply]) -> None:
            try:
                self._on_reply(mm_hash, done.result())
            except StoreError as error:
                self._on_reply(mm_hash, error)

        future.add_done_callback(deliver)

    def unpin(self, pin_id: int) -> None:
        for _ in range(self._num_ranks):
            self._session.submit(Unpin(seq=0, pin_id=pin_id))

    def unwatch(self, mm_hash: str) -> None:
        self._session.submit(Unwatch(seq=0, mm_hash=mm_hash))

    def evict_entry(self, mm_hash: str) -> None:
        """Evict the entry unless another client uses it, so that it is made anew."""
        self._session.submit(Evict(seq=0, mm_hash=mm_hash))

    def close(self) -> None:
        self._session.close()


class EvictingPinLink(PinLink, Protocol):
    """The session with the store, which can also evict entries."""

    def evict_entry(self, mm_hash: str) -> None: ...

    def close(self) -> None: ...


class ReadablePins:
    """`PinLink` in front of another link, whose replies and pushes come to `on_store_reply` and
    `on_store_push`.

    `can_read` may block, and raises TriptychError if it cannot find out.
    """

    def __init__(
        self,
        link: EvictingPinLink,
        can_read: Callable[[Descriptor], bool],
        deliver_reply: OnReply,
        deliver_push: OnPush,
    ) -> None:
        self._link = link
        self._can_read = can_read
        self._deliver_reply = deliver_reply
        self._deliver_push = deliver_push
        self._refused: set[str] = set()  # asked for again; a second time it fails
        self._awaited: set[str] = set()  # asked for and not given up
        self._queue: queue.SimpleQueue[tuple[Descriptor, int, Deliver] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="triptych-readable", daemon=True)
        self._thread.start()

    # ---- the consumer's side ---------------------------------------------------------------------
    def pin_or_watch(self, mm_hash: str) -> None:
        self._awaited.add(mm_hash)
        self._link.pin_or_watch(mm_hash)

    def unpin(self, pin_id: int) -> None:
        self._link.unpin(pin_id)

    def unwatch(self, mm_hash: str) -> None:
        self._forget(mm_hash)
        self._link.unwatch(mm_hash)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)
        self._link.close()

    # ---- the store's side ------------------------------------------------------------------------
    def on_store_reply(self, mm_hash: str, reply: StoreReply | StoreError) -> None:
        """Handle a reply, on the session's thread."""
        deliver = functools.partial(self._deliver_reply, mm_hash, reply)
        if isinstance(reply, Pinned):
            self._check_pin(reply.descriptor, reply.pin_id, deliver)
        else:
            deliver()

    def on_store_push(self, push: EntrySealed | WriterLost) -> None:
        """Handle a push, on the session's thread."""
        deliver = functools.partial(self._deliver_push, push)
        if isinstance(push, EntrySealed):
            self._check_pin(push.descriptor, push.pin_id, deliver)
        else:
            deliver()

    def _check_pin(self, descriptor: Descriptor, pin_id: int, deliver: Deliver) -> None:
        if descriptor.memory == SHM:
            self._forget(descriptor.mm_hash)
            deliver()
        else:
            self._queue.put((descriptor, pin_id, deliver))

    def _run(self) -> None:
        while (waiting := self._queue.get()) is not None:
            try:
                self._check_entry(*waiting)
            except Exception:  # this thread serves every entry: one of them must not end it
                log.exception("pin check failed", mm_hash=waiting[0].mm_hash)

    def _check_entry(self, descriptor: Descriptor, pin_id: int, deliver: Deliver) -> None:
        mm_hash = descriptor.mm_hash
        try:
            is_readable = self._can_read(descriptor)
        except Exception as error:
            if not isinstance(error, TriptychError):
                log.exception("entry cannot be checked", mm_hash=mm_hash, memory=descriptor.memory)
            self._forget(mm_hash)
            self._link.unpin(pin_id)
            self._deliver_reply(mm_hash, StoreError("unreadable", str(error)))
            return
        if is_readable:
            self._forget(mm_hash)
            deliver()
        else:
            self._refuse_pin(descriptor, pin_id)

    def _refuse_pin(self, descriptor: Descriptor, pin_id: int) -> None:
        mm_hash = descriptor.mm_hash
        log.warning("entry cannot be read from here", mm_hash=mm_hash, memory=descriptor.memory)
        self._link.unpin(pin_id)
        if mm_hash in self._refused:
            self._refused.discard(mm_hash)
            why = f"memory {descriptor.memory} cannot be read"
            self._deliver_reply(mm_hash, StoreError("unreadable", why))
            return
        self._link.evict_entry(mm_hash)
        if mm_hash not in self._awaited:
            return
        self._refused.add(mm_hash)
        self._link.pin_or_watch(mm_hash)
        if mm_hash not in self._awaited:  # given up this instant
            self._refused.discard(mm_hash)
            self._link.unwatch(mm_hash)

    def _forget(self, mm_hash: str) -> None:
        """Forget an item that came, failed, or is not needed any more."""
        self._awaited.discard(mm_hash)
        self._refused.discard(mm_hash)
