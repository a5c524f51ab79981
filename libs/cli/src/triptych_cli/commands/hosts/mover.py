"""Plans which entries of a store go where when its host is drained, and has the fabric agent move them.

Most recently used entries go first. An entry fits where the store has room for it without an eviction:
nothing of another host is pushed out for it.

The command acts as a gateway does: its orders go to `transfers:{agent}`, the results to a stream of its own.
Few are in flight at once, so that transfers for requests go first on the links.
"""

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from triptych_common.bus import AsyncBus, StreamConsumer
from triptych_common.coordination import EntryDirectory, NotedPlace, Registry
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncodeClass, InstanceRecord, Role
from triptych_common.protocol.names import OWNER_GROUP
from triptych_common.protocol.store import SHM, EntryInfo
from triptych_common.protocol.transfers import (
    EntryPlace,
    TransferCompleted,
    TransferFailed,
    TransferFailureKind,
    TransferOrder,
)

_PREFILLING = frozenset({Role.PREFILL, Role.PREFILL_DECODE, Role.ENCODE_PREFILL, Role.ENCODE_PREFILL_DECODE})
BLOCK_SPARE = 0.02  # of a store's room: entries take whole blocks
MAX_UNDER_WAY = 8
ORDER_TIMEOUT_S = 60.0
NOTED_AT_ONCE = 128
MAX_NOTED = 1_000_000  # in the directory; gateways also bound it
NOTED_TTL_S = 86_400.0
SPARE_S = 5.0  # after which an order without any report is given up


@dataclass
class TargetRoom:
    """A store that can take entries, and its free bytes."""

    store: str
    free_num_bytes: int


@dataclass(frozen=True)
class Move:
    mm_hash: str
    num_bytes: int
    target: str


@dataclass
class MovePlan:
    moves: list[Move] = field(default_factory=list)
    without_room: list[str] = field(default_factory=list)  # sealed entries that fit nowhere
    num_left: int = 0  # entries that no agent moves: being written, or on a GPU


def target_rooms(records: Sequence[InstanceRecord], source: str) -> list[TargetRoom]:
    """Stores that can take entries of `source`: those that serve prefill engines, else all."""
    agents = _agents(records)
    used = _used_stores(records)
    others = [store for store in sorted(agents) if store != source]
    chosen = [store for store in others if store in used] or others
    rooms = []
    for store in chosen:
        load = agents[store].fabric_load
        free = 0 if load is None else int(load.free_num_bytes * (1 - BLOCK_SPARE))
        rooms.append(TargetRoom(store, free))
    return rooms


def silent_stores(records: Sequence[InstanceRecord], source: str) -> list[str]:
    """Stores that should take entries of `source`, but whose agents are away or have not reported free space.

    Both pass: an agent is restarted, and reports its free space with a heartbeat soon after its start.
    """
    agents = _agents(records)
    ending = {each.store for each in records if each.role is Role.FABRIC and each.draining}
    wanted = _used_stores(records) - {source} - ending or set(agents) - {source}
    return sorted(store for store in wanted if store not in agents or agents[store].fabric_load is None)


def _agents(records: Sequence[InstanceRecord]) -> dict[str, InstanceRecord]:
    """Agents that accept offers, by store."""
    return {
        each.store: each
        for each in records
        if each.role is Role.FABRIC and each.fabric is not None and not each.draining and each.store
    }


def _used_stores(records: Sequence[InstanceRecord]) -> set[str]:
    """Stores whose hosts have prefill engines."""
    return {each.store for each in records if each.role in _PREFILLING and not each.draining and each.store}


def plan_moves(
    entries: Sequence[EntryInfo], rooms: Sequence[TargetRoom], done: Mapping[str, str] | None = None
) -> MovePlan:
    """Assign each sealed entry to the store with the most room left, and take that room.

    `done` has entries moved before, with their stores.
    """
    plan = MovePlan()
    for entry in sorted(entries, key=lambda each: each.age_s):
        if entry.mm_hash in (done or {}):
            continue
        if entry.state not in ("ready", "pinned") or entry.spec is None or entry.memory != SHM:
            plan.num_left += 1
            continue
        room = max(rooms, key=lambda each: each.free_num_bytes, default=None)
        if room is None or room.free_num_bytes < entry.spec.num_bytes:
            plan.without_room.append(entry.mm_hash)
            continue
        room.free_num_bytes -= entry.spec.num_bytes
        plan.moves.append(Move(entry.mm_hash, entry.spec.num_bytes, room.store))
    return plan


@dataclass
class MoveResults:
    """Moves of entries that have succeeded or failed so far."""

    num_moved: int = 0
    num_bytes: int = 0  # that crossed the network
    moved: dict[str, str] = field(default_factory=dict)  # entries, and the stores they went to
    failures: dict[str, str] = field(default_factory=dict)  # entries, and why they did not go
    num_gone: int = 0  # evicted since they were listed: nothing is left of them that could be moved


async def note_places(
    bus: AsyncBus, moves: Sequence[Move], moved: Mapping[str, str], records: Sequence[InstanceRecord]
) -> None:
    """Record in the gateways' directory which stores have the moved entries.

    Raises:
        BusUnavailableError: some were not recorded; the next request for one has it encoded again.
    """
    generations = {each.store: each.fabric.generation for each in records if each.fabric is not None}
    noted = [
        NotedPlace(
            MmHash(each.mm_hash),
            EntryPlace(store=each.target, generation=generations[each.target], num_bytes=each.num_bytes),
        )
        for each in moves
        if each.mm_hash in moved and each.target in generations
    ]
    directory = EntryDirectory(bus, max_items=MAX_NOTED, ttl_s=NOTED_TTL_S)
    for start in range(0, len(noted), NOTED_AT_ONCE):
        await directory.add(noted[start : start + NOTED_AT_ONCE])


class Mover:
    """Moves entries of one store; use `moving`, in one event loop."""

    def __init__(
        self, bus: AsyncBus, agent: str, source: str, on_progress: Callable[[MoveResults], None]
    ) -> None:
        """`agent` is the instance of the agent beside the store `source`."""
        self._bus, self._agent, self._source = bus, agent, source
        self._on_progress = on_progress
        self._own_name = f"drain-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._under_way: dict[str, tuple[Move, float]] = {}  # by transfer_id; until when it is waited for
        self.results = MoveResults()

    async def move(self, moves: Sequence[Move], deadline: float) -> None:
        """Order all moves; return when each has ended, or at `deadline` (monotonic seconds).

        Raises:
            BusUnavailableError: Redis cannot be reached.
        """
        if not moves:
            return
        stream = self._bus.names.encode_results(self._own_name)
        left = list(reversed(moves))
        try:
            async with self._bus.consumer(
                stream, group=OWNER_GROUP, consumer=self._own_name, prefetch=2 * MAX_UNDER_WAY
            ) as consumer:
                await self._run(left, consumer, deadline)
        finally:
            for move in (*left, *(move for move, _ in self._under_way.values())):
                self.results.failures.setdefault(move.mm_hash, "the time was over")
            self._under_way.clear()
            await Registry(self._bus).clear_inboxes(self._own_name)

    async def _run(self, left: list[Move], consumer: StreamConsumer, deadline: float) -> None:
        while left or self._under_way:
            now = time.monotonic()
            if now >= deadline:
                return
            while left and len(self._under_way) < MAX_UNDER_WAY:
                await self._order(left[-1], min(deadline - now, ORDER_TIMEOUT_S))
                left.pop()
            first_end = min(until for _, until in self._under_way.values())
            try:
                async with asyncio.timeout(max(0.0, min(deadline, first_end) - time.monotonic())):
                    delivery = await anext(consumer)
            except TimeoutError:
                self._give_up_silent(time.monotonic())
                continue
            self._take(delivery.envelope.message)
            delivery.ack_soon()

    async def _order(self, move: Move, timeout_s: float) -> None:
        order = TransferOrder(
            transfer_id=f"{self._own_name}-{uuid.uuid4().hex}",
            mm_hash=move.mm_hash,
            entries=(move.mm_hash,),
            source=self._source,
            target=move.target,
            gateway=self._own_name,
            encode_class=EncodeClass.AHEAD,
        )
        stream = self._bus.names.transfers(self._agent)
        await self._bus.publish(stream, order, remaining_ms=int(timeout_s * 1000))
        self._under_way[order.transfer_id] = (move, time.monotonic() + timeout_s + SPARE_S)

    def _take(self, message: object) -> None:
        if not isinstance(message, TransferCompleted | TransferFailed):
            return
        move, _ = self._under_way.pop(message.transfer_id, (None, 0.0))
        if move is None:  # the order was given up, or this is a repeated result
            return
        if isinstance(message, TransferCompleted):
            self.results.num_moved += 1
            self.results.num_bytes += message.num_bytes
            self.results.moved[move.mm_hash] = move.target
        elif message.kind is TransferFailureKind.ABSENT:
            self.results.num_gone += 1
        else:
            self.results.failures[move.mm_hash] = message.kind.value
        self._on_progress(self.results)

    def _give_up_silent(self, now: float) -> None:
        for transfer_id in [each for each, (_, until) in self._under_way.items() if until <= now]:
            move, _ = self._under_way.pop(transfer_id)
            self.results.failures[move.mm_hash] = "the agent does not answer"
            self._on_progress(self.results)
