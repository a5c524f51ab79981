"""Consumers that never come back: each new name stays in its group until somebody removes it."""

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.redis_client.commands import run_command, send_command

IDLE_CONSUMER_MS = 600_000

# Only consumers that hold nothing: what a removed one held would be delivered to nobody any more.
# XINFO fails where there is no stream or no group: then there is nothing to remove.
_DROP = """
local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
if consumers.err then return 0 end
local dropped = 0
for _, flat in ipairs(consumers) do
  local about = {}
  for index = 1, #flat, 2 do about[flat[index]] = flat[index + 1] end
  if about['pending'] == 0 and about['idle'] >= tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], about['name'])
    dropped = dropped + 1
  end
end
return dropped
"""


async def drop_idle_consumers(
    bus: AsyncBus, stream: str, group: str, *, idle_ms: int = IDLE_CONSUMER_MS
) -> int:
    """Remove the group's consumers that hold nothing and have not asked for `idle_ms`; their number.

    One that lives after all is back with its next read.

    Raises:
        BusUnavailableError
    """
    reply: int = await run_command(
        "drop_idle_consumers",
        lambda: send_command(bus.client, "EVAL", _DROP, 1, stream, group, idle_ms),
    )
    return reply
