"""Instance of each stored response, for every gateway: one key each, which expires."""

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.redis_client.commands import run_command, send_command


class StoredResponses:
    """Records by response id, as JSON that is not parsed here."""

    def __init__(self, bus: AsyncBus, ttl_s: float) -> None:
        self._bus = bus
        self._ttl_ms = max(1, int(ttl_s * 1000))

    async def get(self, response_id: str) -> bytes | None:
        """Return the record of a response, or None; raises BusUnavailableError."""
        client, key = self._bus.client, self._bus.names.response(response_id)
        value: bytes | None = await run_command("response_get", lambda: send_command(client, "GET", key))
        return value

    async def set(self, response_id: str, record: bytes) -> None:
        """Keep the record of a response for as long as records are kept; raises BusUnavailableError."""
        client, key = self._bus.client, self._bus.names.response(response_id)
        await run_command(
            "response_set", lambda: send_command(client, "SET", key, record, "PX", self._ttl_ms)
        )
