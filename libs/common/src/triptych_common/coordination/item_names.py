"""Items that callers named by a `uuid`, for every gateway.

A hash for each owner and the order of its names, bounded as the sizes are (`SharedSizes`): no caller fills
Redis with names, or drops another's.
"""

from collections.abc import Sequence

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.coordination.entry_directory import MAX_DROPPED, SET_FIELD
from triptych_common.redis_client.commands import run_command

NAMES_TTL_S = 6 * 3600  # of all names of an owner, after the last use of one
MAX_NAMES = 10_000  # of one owner, about 4 MB


class ItemNames:
    """Records by owner and digest of the name, as JSON that is not parsed here."""

    def __init__(self, bus: AsyncBus, *, max_names: int = MAX_NAMES, ttl_s: float = NAMES_TTL_S) -> None:
        self._bus = bus
        self._max_names = max_names
        self._ttl_ms = max(1, int(ttl_s * 1000))

    async def exchange(self, owner: str, names: Sequence[tuple[str, bytes | None]]) -> list[bytes | None]:
        """Set the record of each name that has one, and return those of the others, in one round trip.

        The names are taken in their order: one that is set is found by those after it. The owner's oldest
        ones beyond the bound are dropped.

        Raises:
            BusUnavailableError: some may have been set.
        """
        keys = [self._bus.names.item_names(owner), self._bus.names.item_names_order(owner)]

        async def send() -> list[bytes | None]:
            async with self._bus.client.pipeline(transaction=False) as pipe:
                for digest, record in names:
                    field = bytes.fromhex(digest)
                    if record is None:
                        pipe.execute_command("HGET", keys[0], field)
                        continue
                    arguments = SET_FIELD.arguments(
                        field=field, value=record, ttl_ms=self._ttl_ms, is_due=1,
                        max_items=self._max_names, max_dropped=MAX_DROPPED,
                    )  # fmt: skip
                    pipe.eval(SET_FIELD.text, len(keys), *keys, *arguments)
                if all(record is None for _, record in names):  # else the script has done it
                    for key in keys:
                        pipe.execute_command("PEXPIRE", key, self._ttl_ms)
                replies = await pipe.execute()
            found = zip(replies[: len(names)], names, strict=True)
            return [reply if record is None else None for reply, (_, record) in found]

        return await run_command("item_names", send)
