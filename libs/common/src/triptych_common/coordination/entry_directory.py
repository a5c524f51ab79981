"""Directory of entries: which stores have an entry, as far as gateways know.

Only a hint: an entry may have been evicted since, and the store may have restarted
(`EntryPlace.generation`). Bounded as the sizes are (`SharedSizes`): a hash and the order of its fields, the
oldest go first, and without new ones all of it expires. Used only where several stores are registered.

Each value is text, one line for each store: `STORE GENERATION NUM_BYTES`.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from pydantic import ValidationError

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.transfers import EntryPlace
from triptych_common.redis_client.commands import run_command, send_command
from triptych_common.redis_client.scripts import load_script

MAX_SIZES_BYTES = 4096  # of one item's
MAX_DROPPED = 100  # by one write, where the bound was lowered: a script must not keep Redis for long
BOUNDED_HASH = files(__package__).joinpath("lua", "bounded_hash.lua").read_text("utf-8")
SET_FIELD = load_script(__package__, "set_field", prelude=BOUNDED_HASH)

MAX_PLACES = 8  # of one entry
ADD_PLACE = load_script(__package__, "add_place", prelude=BOUNDED_HASH)
REMOVE_PLACE = load_script(__package__, "remove_place")


class Lifetime:
    """Lifetime of keys that all expire without new items: renewed by a write after a tenth of it."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_ms = max(1, int(ttl_s * 1000))
        self._renewed_at = -math.inf

    def is_due(self, now: float) -> bool:
        """Return whether the write at `now`, in seconds of any clock, renews it."""
        is_due = now - self._renewed_at > 0.1 * self.ttl_ms / 1000
        if is_due:
            self._renewed_at = now
        return is_due


class SharedSizes:
    """Sizes by mm_hash, as JSON that is not parsed here.

    They are shared by all gateways and kept over their restarts. A hash and the order of its items, not a key
    per item, so that they can be counted and the oldest dropped. A gateway that finds no sizes orders the
    item once more. Without new ones all of it expires.
    """

    def __init__(self, bus: AsyncBus, *, max_items: int, ttl_s: float) -> None:
        """Store the bounds; `max_items` counts items of all gateways, and each writer enforces its own."""
        self._bus = bus
        self._names = bus.names
        self._max_items = max_items
        self._lifetime = Lifetime(ttl_s)
        self._set = bus.client.register_script(SET_FIELD.text)

    async def get(self, mm_hash: str) -> bytes | None:
        """Return the value kept for `mm_hash`; raises BusUnavailableError."""
        client, field = self._bus.client, bytes.fromhex(mm_hash)
        value: bytes | None = await run_command(
            "sizes_get", lambda: send_command(client, "HGET", self._names.sizes, field)
        )
        return value

    async def set(self, mm_hash: str, value: bytes) -> bool:
        """Keep `value`; return False if it is too large; raises BusUnavailableError."""
        if len(value) > MAX_SIZES_BYTES:
            return False
        keys = [self._names.sizes, self._names.sizes_order]
        arguments = SET_FIELD.arguments(
            field=bytes.fromhex(mm_hash), value=value, ttl_ms=self._lifetime.ttl_ms,
            is_due=int(self._lifetime.is_due(time.monotonic())), max_items=self._max_items,
            max_dropped=MAX_DROPPED,
        )  # fmt: skip
        await run_command("sizes_set", lambda: self._set(keys=keys, args=arguments))
        return True


@dataclass(frozen=True, slots=True)
class NotedPlace:
    mm_hash: MmHash
    place: EntryPlace


class EntryDirectory:
    """Stores of each entry, by its mm_hash. Every method is one round trip."""

    def __init__(self, bus: AsyncBus, *, max_items: int, ttl_s: float) -> None:
        """Store the bounds; `max_items` counts entries of all gateways, and each writer enforces its own."""
        self._bus = bus
        self._keys = [bus.names.entries, bus.names.entries_order]
        self._max_items = max_items
        self._lifetime = Lifetime(ttl_s)

    async def find(self, mm_hashes: Sequence[MmHash]) -> dict[MmHash, tuple[EntryPlace, ...]]:
        """Return the places of the entries that have any, the latest first; raises BusUnavailableError."""
        if not mm_hashes:
            return {}

        async def ask() -> list[bytes | None]:
            async with self._bus.client.pipeline(transaction=False) as pipe:
                for each in mm_hashes:
                    pipe.hget(self._keys[0], bytes.fromhex(each))
                return await pipe.execute()

        values = await run_command("entries_get", ask)
        found = {each: _places_of(value) for each, value in zip(mm_hashes, values, strict=True)}
        return {each: places for each, places in found.items() if places}

    async def add(self, noted: Sequence[NotedPlace]) -> None:
        """Record that the stores have these entries now.

        Raises:
            BusUnavailableError: some may have been noted.
        """

        is_due = self._lifetime.is_due(time.monotonic())

        async def note() -> None:
            async with self._bus.client.pipeline(transaction=False) as pipe:
                for each in noted:
                    place = each.place
                    arguments = ADD_PLACE.arguments(
                        mm_hash=bytes.fromhex(each.mm_hash), store=place.store,
                        line=f"{place.store} {place.generation} {place.num_bytes}",
                        max_places=MAX_PLACES, ttl_ms=self._lifetime.ttl_ms, is_due=int(is_due),
                        max_items=self._max_items, max_dropped=MAX_DROPPED,
                    )  # fmt: skip
                    pipe.eval(ADD_PLACE.text, len(self._keys), *self._keys, *arguments)
                await pipe.execute()

        await run_command("entries_add", note)

    async def remove(self, noted: Sequence[NotedPlace]) -> None:
        """Remove these places: the store was restarted, or reports the entry as gone.

        Raises:
            BusUnavailableError: some may have been removed.
        """

        async def forget() -> None:
            async with self._bus.client.pipeline(transaction=False) as pipe:
                for each in noted:
                    arguments = REMOVE_PLACE.arguments(
                        mm_hash=bytes.fromhex(each.mm_hash), store=each.place.store,
                        generation=each.place.generation,
                    )  # fmt: skip
                    pipe.eval(REMOVE_PLACE.text, len(self._keys), *self._keys, *arguments)
                await pipe.execute()

        await run_command("entries_remove", forget)


def _places_of(value: bytes | None) -> tuple[EntryPlace, ...]:
    """Parse places; unreadable lines are skipped."""
    places: list[EntryPlace] = []
    for line in reversed((value or b"").split(b"\n")):
        fields = line.split()
        if len(fields) != 3:
            continue
        try:
            place = EntryPlace(store=fields[0].decode(), generation=int(fields[1]), num_bytes=int(fields[2]))
        except (ValidationError, ValueError):
            continue
        places.append(place)
    return tuple(places)
