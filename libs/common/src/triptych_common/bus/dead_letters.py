"""Dead letters: entries that no consumer can handle, kept with the reason for the person on call."""

import asyncio
from collections.abc import Mapping

from redis.exceptions import ResponseError

from triptych_common.bus.consumer_group import ConsumerGroup, StreamEntry
from triptych_common.bus.publisher import DEAD_LETTERS_MAX_ENTRIES
from triptych_common.redis_client.commands import is_out_of_memory, reconnect_backoff
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_FIELD_BYTES = 8192  # longer fields are cut: dead letters stay small
ATTEMPTS = 8  # while Redis is out of memory; about three seconds


async def bury(group: ConsumerGroup, entry: StreamEntry, reason: str, dead_letters: str) -> None:
    """Move `entry` to the stream `dead_letters`; a letter may stand there twice.

    While Redis is out of memory this is tried a few times; then only the log has the letter: the entry must
    not block later ones, and deleting it frees memory.

    Raises:
        RedisError, OSError: the entry stays pending.
    """
    letter = letter_of(entry, group.stream, reason)
    backoff = reconnect_backoff()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            await group.replace(entry.entry_id, letter, dead_letters, DEAD_LETTERS_MAX_ENTRIES)
        except ResponseError as error:
            if not is_out_of_memory(error):
                raise
        else:
            return
        if attempt < ATTEMPTS:
            await asyncio.sleep(backoff.compute(attempt))
    log.error("dead letter lost, redis is out of memory", stream=group.stream, reason=reason)
    await group.ack([entry.entry_id])


def letter_of(entry: StreamEntry, stream: str, reason: str) -> Mapping[bytes, bytes]:
    """Return the fields of `entry`, cut and without media, with its origin and the reason."""
    letter = {name: value[:MAX_FIELD_BYTES] for name, value in entry.fields.items() if name != b"blob"}
    letter[b"blob_num_bytes"] = str(len(entry.fields.get(b"blob", b""))).encode()
    letter[b"source_stream"] = stream.encode()
    letter[b"source_id"] = entry.entry_id
    letter[b"reason"] = reason.encode()[:MAX_FIELD_BYTES]
    return letter
