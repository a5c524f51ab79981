"""Items that callers named by a `uuid`, for every gateway: one key each, which expires unless it is used."""

from collections.abc import Sequence

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.redis_client.commands import run_command

NAME_TTL_S = 6 * 3600  # after its last use


class ItemNames:
    """Records by owner and digest of the name, as JSON that is not parsed here."""

    def __init__(self, bus: AsyncBus, ttl_s: float = NAME_TTL_S) -> None:
        self._bus = bus
        self._ttl_ms = max(1, int(ttl_s * 1000))

    async def exchange(self, owner: str, names: Sequence[tuple[str, bytes | None]]) -> list[bytes | None]:
        """Set the record of each name that has one, and return those of the others, in one round trip.

        The names are taken in their order: one that is set is found by those after it.

        Raises:
            BusUnavailableError: some may have been set.
        """
        keys = [self._bus.names.item_name(owner, digest) for digest, _ in names]

        async def send() -> list[bytes | None]:
            async with self._bus.client.pipeline(transaction=False) as pipe:
                for key, (_, record) in zip(keys, names, strict=True):
                    if record is None:
                        pipe.execute_command("GET", key)
                    else:
                        pipe.execute_command("SET", key, record, "PX", self._ttl_ms)
                for key in keys:
                    pipe.execute_command("PEXPIRE", key, self._ttl_ms)
                replies = await pipe.execute()
            found = zip(replies[: len(names)], names, strict=True)
            return [reply if record is None else None for reply, (_, record) in found]

        return await run_command("item_names", send)
