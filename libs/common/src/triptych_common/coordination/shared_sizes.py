"""Placeholder sizes of items encoded before, shared by all gateways and kept over their restarts.

A hash and the order of its items, not a key per item, so that they can be counted and the oldest dropped. A
gateway that finds no sizes orders the item once more. Without new ones all of it expires.
"""

import math
import time
from importlib.resources import files

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.redis_client.commands import run_command, send_command
from triptych_common.redis_client.scripts import load_script

MAX_SIZES_BYTES = 4096  # of one item's
MAX_DROPPED = 100  # by one write, where the bound was lowered: a script must not keep Redis for long
BOUNDED_HASH = files(__package__).joinpath("lua", "bounded_hash.lua").read_text("utf-8")
SET_SIZES = load_script(__package__, "set_sizes", prelude=BOUNDED_HASH)


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
    """Sizes by mm_hash, as JSON that is not parsed here."""

    def __init__(self, bus: AsyncBus, *, max_items: int, ttl_s: float) -> None:
        """Store the bounds; `max_items` counts items of all gateways, and each writer enforces its own."""
        self._bus = bus
        self._names = bus.names
        self._max_items = max_items
        self._lifetime = Lifetime(ttl_s)
        self._set = bus.client.register_script(SET_SIZES.text)

    async def get(self, mm_hash: str) -> bytes | None:
        """Return the value kept for `mm_hash`.

        Raises:
            BusUnavailableError
        """
        client, field = self._bus.client, bytes.fromhex(mm_hash)
        value: bytes | None = await run_command(
            "sizes_get", lambda: send_command(client, "HGET", self._names.sizes, field)
        )
        return value

    async def set(self, mm_hash: str, value: bytes) -> bool:
        """Keep `value`; return False if it is too large.

        Raises:
            BusUnavailableError
        """
        if len(value) > MAX_SIZES_BYTES:
            return False
        keys = [self._names.sizes, self._names.sizes_order]
        arguments = SET_SIZES.arguments(
            mm_hash=bytes.fromhex(mm_hash), value=value, ttl_ms=self._lifetime.ttl_ms,
            is_due=int(self._lifetime.is_due(time.monotonic())), max_items=self._max_items,
            max_dropped=MAX_DROPPED,
        )  # fmt: skip
        await run_command("sizes_set", lambda: self._set(keys=keys, args=arguments))
        return True
