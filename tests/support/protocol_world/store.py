"""The real store's logic, its clients' real session state, and FIFO queues between them."""

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from tests.support.protocol_steps import Channel
from tests.support.protocol_world.network import STORE, step_of
from tests.support.protocol_world.virtual_loop import CLOCK
from tests.support.stores import core_on
from triptych_cache_store.core.store_core import StoreCore
from triptych_cache_store.entries.entry_table import Entry
from triptych_cache_store.entries.leases import SessionId
from triptych_cache_store.entries.space import Limits
from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.protocol.store import (
    Done,
    EntrySealed,
    Pinned,
    Reserve,
    StoreCommand,
    StoreFailure,
    StoreReply,
    Unpin,
    Welcome,
    WriterLost,
)
from triptych_common.region.fence import Place, StaleReservationError, check_reservation
from triptych_common.region.layout import RegionLayout
from triptych_common.store_session.resumption import Request
from triptych_common.store_session.session_state import SessionState

BLOCK_BYTES = 4096


class ClientSession:
    """A client's end of a session. `new_future` makes what stands for a pending answer."""

    def __init__(
        self,
        store: "StoreActor",
        client: str,
        new_future: Callable[[], Any],
        on_push: Callable[[EntrySealed | WriterLost], None] = lambda push: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.client = client
        self.state: SessionState[Any] = SessionState(client, None)
        self.to_store: deque[StoreCommand | None] = deque()  # None: the end of the connection
        self.from_store: deque[StoreReply] = deque()
        self.unsent: list[Request[Any]] = []
        self.is_connected = False
        self.is_over = False
        self.awaits_done = False  # it goes on when a command is carried out
        self.held: set[int] = set()  # pins that were received, and not given back
        self._store = store
        self._new_future = new_future
        self._on_push = on_push
        self._on_lost = on_lost
        store.connect(self)

    # ---- what its process does -------------------------------------------------------------------
    @property
    def welcome(self) -> Welcome:
        assert self.state.welcome is not None
        return self.state.welcome

    def submit(self, command: StoreCommand) -> Any:
        future = self._new_future()
        if isinstance(command, Unpin):
            self.held.discard(command.pin_id)
        if self.is_over:
            future.set_exception(StoreUnavailableError("the session with the store has ended"))
            future.exception()
        else:
            self.send(Request(command, future))
        return future

    def send(self, request: Request[Any]) -> None:
        if self.is_connected:
            self.to_store.append(self.state.frame_request(request))  # type: ignore[arg-type] # see `virtual_time`
        else:
            self.unsent.append(request)

    # ---- what the world does ---------------------------------------------------------------------
    def receive_push(self) -> None:
        """The next frame."""
        reply = self.from_store.popleft()
        if isinstance(reply, Pinned | EntrySealed):
            self.held.add(reply.pin_id)
        if isinstance(reply, EntrySealed | WriterLost):
            self._store.coverage[step_of(Channel.PUSH, STORE, self.client, reply)] += 1
        for pending, event in self.state.on_data(reply):  # type: ignore[arg-type]
            if pending is None:
                assert isinstance(event, EntrySealed | WriterLost)
                self._on_push(event)
            elif not pending.done():
                pending.set_result(event)

    def welcomed(self, reply: StoreReply) -> None:
        """Connected, or over: the store does not know us any more."""
        try:
            repeats = self.state.on_welcome(reply)  # type: ignore[arg-type]
        except StoreUnavailableError as error:
            self.is_over = True
            for pending in self.state.take_pending():
                if not pending.done():
                    pending.set_exception(error)
                    pending.exception()
            self._on_lost()
            return
        assert repeats is not None
        self.is_connected = True
        waiting, self.unsent = [*repeats, *self.unsent], []
        for request in waiting:
            self.send(request)

    def kill(self) -> None:
        """Its process is gone. What it wrote to the socket is read, and then the end."""
        self.is_over = True
        self.from_store.clear()
        if self.is_connected:
            self.to_store.append(None)
        self.is_connected = False


class PlayedMapping:
    """`RegionMapping` of one process: of the region that the store had when its session began."""

    writable = True

    def __init__(self, region: bytearray, layout: RegionLayout) -> None:
        self._region = memoryview(region)
        self.layout = layout
        self.num_bytes = len(region)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        return self._region[offset : offset + num_bytes]

    def write(self, order: Place, content: bytes) -> None:
        """As an encoder's worker does: nothing, where the reservation has ended."""
        with contextlib.suppress(StaleReservationError):
            check_reservation(cast("Any", self), order, len(content))
            self.view(order.offset, len(content))[:] = content


class StoreActor:
    """One store, restarted in place."""

    def __init__(
        self,
        num_blocks: int,
        num_reserve_blocks: int,
        hashes: list[str],
        coverage: Counter[str],
        name: str = STORE,
        has_bytes: bool = False,
    ) -> None:
        """`has_bytes`: its region has the bytes of entries, too, and not their headers alone."""
        self.name = name
        self.layout = RegionLayout(BLOCK_BYTES, num_blocks, num_pin_records=48, num_client_slots=16)
        self.limits = Limits(num_reserve_blocks=num_reserve_blocks)
        self.coverage = coverage
        self.sessions: dict[SessionId, ClientSession] = {}  # connections, also those whose client is gone
        self.waiting: set[tuple[str, str]] = set()  # (client, mm_hash): refused for want of space
        self._has_bytes = has_bytes
        self._past_evictions = 0
        self._hashes = {mm_hash: index + 1 for index, mm_hash in enumerate(hashes)}
        self._clients: dict[str, int] = {}
        self._num_ids: Counter[tuple[str, int]] = Counter()
        self._session_ids = itertools.count(1)
        self._slots: dict[int, ClientSession] = {}
        self._generation = 0
        self._region_id = 0
        self.core: StoreCore
        self.start(keeps_region=False)

    def start(self, *, keeps_region: bool) -> None:
        self._generation += 1
        if self._generation > 1:
            self._past_evictions += self.core.space.num_evictions
        if not keeps_region:
            num_bytes = self.layout.entries_offset + 256 * self.layout.num_blocks
            if self._has_bytes:
                num_bytes = self.layout.data_offset + BLOCK_BYTES * self.layout.num_blocks
            self.region = bytearray(num_bytes)
            self._region_id += 1
            self._slots = {}
        self.core = core_on(
            self.region,
            self.layout,
            generation=self._generation,
            limits=self.limits,
            is_alive=lambda slot: slot in self._slots and not self._slots[slot].is_over,
            is_connected=lambda session_id: not self.sessions[session_id].is_over,
            now=CLOCK.now,
        )
        state = self.core.state
        state.identity = replace(state.identity, store=self.name, region_id=f"region-{self._region_id}")

    def restart(self, *, keeps_region: bool) -> None:
        """Killed, and started again. What was on its way in either direction is lost."""
        for session in self.sessions.values():
            session.is_connected = False
            session.to_store.clear()
            session.from_store.clear()
        self.sessions = {}
        self.start(keeps_region=keeps_region)

    def connect(self, session: ClientSession) -> None:
        """Hello and welcome in one: a client does nothing else meanwhile."""
        session_id = SessionId(next(self._session_ids))
        self.sessions[session_id] = session
        hello: Any = session.state.begin_connection()
        self.coverage[step_of(Channel.STORE, session.client, STORE, hello)] += 1
        self._name_ids(session.client, 0)
        replies = self._handle(session_id, hello)
        session.welcomed(replies)
        if session.is_connected:
            self._slots[session.welcome.client_slot] = session
        else:  # the store has a lease for it by now: it ends with the connection
            session.to_store.append(None)

    def _handle(self, session_id: SessionId, hello: StoreCommand) -> StoreReply:
        reply, *others = self.core.handle(session_id, hello, CLOCK.now)
        self._send(others)
        return reply.reply

    @property
    def num_evictions(self) -> int:
        return self._past_evictions + self.core.space.num_evictions

    # ---- transitions -----------------------------------------------------------------------------
    @property
    def busy(self) -> list[SessionId]:
        """Connections with a command to carry out."""
        return [session_id for session_id, session in self.sessions.items() if session.to_store]

    @property
    def needs_reaping(self) -> bool:
        return any(
            lease.slot not in self._slots or self._slots[lease.slot].is_over
            for lease in self.core.leases.detached_leases()
        )

    def run_next(self, session_id: SessionId) -> None:
        """Carry out the next command of a connection, or its end."""
        session = self.sessions[session_id]
        command = session.to_store.popleft()
        if command is None:
            self._send(self.core.disconnect(session_id, CLOCK.now))
            del self.sessions[session_id]
            return
        self.coverage[step_of(Channel.STORE, session.client, STORE, command)] += 1
        self._name_ids(session.client, self._hash_of(command))
        out = self.core.handle(session_id, command, CLOCK.now)
        if isinstance(command, Reserve):
            self.waiting.discard((session.client, command.mm_hash))
            if any(isinstance(reply, StoreFailure) and reply.code == "full" for _, reply, _ in out):
                self.waiting.add((session.client, command.mm_hash))
        self._send(out)

    def refuse(self, session_id: SessionId) -> None:
        """Answer the next command of a connection with an error."""
        session = self.sessions[session_id]
        command = session.to_store.popleft()
        assert command is not None
        session.from_store.append(StoreFailure(seq=command.seq, code="internal", detail="refused"))

    def reap(self) -> None:
        self._send(self.core.reap(CLOCK.now))

    def map_region(self) -> "PlayedMapping | None":
        """None: there are no bytes."""
        return PlayedMapping(self.region, self.layout) if self._has_bytes else None

    def read(self, entry: Entry) -> bytes:
        offset = self.core.state.offset_of(entry)
        return bytes(self.region[offset : offset + entry.spec.num_bytes])

    def evict(self, mm_hash: str) -> None:
        """As an operator does, or pressure from others."""
        entry = self.core.space.sealed_unpinned(mm_hash)  # type: ignore[arg-type]
        assert entry is not None
        self.core.space.evict(entry)

    # ---- inside ----------------------------------------------------------------------------------
    def _send(self, out: Any) -> None:
        for session_id, reply, _ in out:
            session = self.sessions.get(session_id)
            if session is not None and session.is_connected:
                session.from_store.append(reply)
        for session in self.sessions.values():
            while not session.awaits_done and session.from_store and isinstance(session.from_store[0], Done):
                session.receive_push()  # it changes nothing

    def _hash_of(self, command: StoreCommand) -> int:
        mm_hash = getattr(command, "mm_hash", None)
        if mm_hash is None:
            entry = self.core.table.find_reservation(getattr(command, "reservation_id", 0))  # type: ignore[arg-type]
            mm_hash = entry.mm_hash if entry is not None else None
        return self._hashes.get(mm_hash or "", 0)

    def _name_ids(self, client: str, number: int) -> None:
        """Ids that follow from the client and its command, not from the order: equal states look equal."""
        index = self._clients.setdefault(client, len(self._clients) + 1)
        self._num_ids[client, number] += 1
        base = ((index * 16 + number) * 4096 + self._num_ids[client, number]) * 16
        self.core.state.ids = itertools.count((self._generation << 40) + base)
