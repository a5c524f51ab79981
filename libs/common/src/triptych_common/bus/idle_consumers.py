"""Removal of consumers that never come back: each new name stays in its group until it is removed."""

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.redis_client.commands import run_command, send_command
from triptych_common.redis_client.scripts import load_script

IDLE_CONSUMER_MS = 600_000

DROP_IDLE = load_script(__package__, "drop_idle_consumers")


async def drop_idle_consumers(
    bus: AsyncBus, stream: str, group: str, *, idle_ms: int = IDLE_CONSUMER_MS
) -> int:
    """Remove the group's consumers that hold nothing and have not read for `idle_ms`; return their number.

    A removed consumer that is alive returns with its next read.

    Raises:
        BusUnavailableError
    """
    arguments = DROP_IDLE.arguments(group=group, idle_ms=idle_ms)
    reply: int = await run_command(
        "drop_idle_consumers", lambda: send_command(bus.client, "EVAL", DROP_IDLE.text, 1, stream, *arguments)
    )
    return reply
