"""Plans which entries of a store go where, when its host is drained. Pure.

Most recently used entries go first. An entry fits where the store has room for it without an eviction:
nothing of another host is pushed out for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_common.protocol.store import SHM, EntryInfo

_PREFILLING = frozenset({Role.PREFILL, Role.PREFILL_DECODE, Role.ENCODE_PREFILL, Role.ENCODE_PREFILL_DECODE})
BLOCK_SPARE = 0.02  # of a store's room: entries take whole blocks


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
