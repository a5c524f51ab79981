"""Commands and round trips of a gateway to Redis, per kind of request.

The gateway runs in this process, between a fake encoder and a fake prefill_decode, with a real Redis; what
its connections write is counted. A write is a round trip. What it does without requests (heartbeats, the
registry, the wait for results) is left out by name. Commands that go out with the wait for results are
counted, but are no round trip: nothing waits for their answer that would not wait without them.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio.connection import AbstractConnection

from tests.conftest import embedded_redis
from tests.support.gateway.samples import data_url, image_bytes
from tests.support.gateway.system import System, opened_system

NUM_REQUESTS = 20
SETTLE_S = 0.5  # acks and the ends of flights follow the answer
WAIT = "XREADGROUP"  # for results, with or without requests
# What goes on without requests.
UPKEEP = frozenset({"PING", "CLIENT", "HELLO", "INFO", "ZRANGE", "ZRANGEBYSCORE", "MGET", WAIT})

HEARTBEAT = "MULTI"  # nothing else of a gateway is a transaction


@dataclass(frozen=True)
class RedisCounts:
    """Redis round trips and commands of one kind of request, for each request."""

    kind: str
    round_trips: float
    commands: dict[str, float]


class _Written:
    def __init__(self) -> None:
        self.num_writes = 0
        self.commands: Counter[str] = Counter()

    def add(self, data: bytes) -> None:
        names = [*_names(data)]
        if HEARTBEAT in names:
            return
        is_wait = WAIT in names
        names = [name for name in names if name not in UPKEEP]
        self.num_writes += bool(names) and not is_wait
        self.commands.update(names)


def _names(data: bytes) -> Iterator[str]:
    """Names of the commands in bytes written to Redis."""
    position = 0
    while position < len(data):
        end = data.index(b"\r\n", position)
        num_words = int(data[position + 1 : end])
        position = end + 2
        for index in range(num_words):
            end = data.index(b"\r\n", position)
            num_bytes = int(data[position + 1 : end])
            if index == 0:
                yield data[end + 2 : end + 2 + num_bytes].decode().upper()
            position = end + 2 + num_bytes + 2


@contextmanager
def _counting(client_name: str) -> Iterator[_Written]:
    """Count the bytes that connections of this name write during the block."""
    written = _Written()
    connection: Any = AbstractConnection
    send = connection.send_packed_command

    async def counted(self: Any, command: bytes | str | Iterable[bytes], *args: Any, **options: Any) -> Any:
        if self.client_name is not None and self.client_name.startswith(client_name):
            pieces = [command] if isinstance(command, (bytes, str)) else [*command]
            written.add(b"".join(each.encode() if isinstance(each, str) else each for each in pieces))
            return await send(self, pieces, *args, **options)
        return await send(self, command, *args, **options)

    connection.send_packed_command = counted
    try:
        yield written
    finally:
        connection.send_packed_command = send


async def count_redis() -> list[RedisCounts]:
    """Counts for a text, a new image, and an image whose sizes the gateway remembers."""
    with embedded_redis() as server, tempfile.TemporaryDirectory() as folder:  # 0700
        async with opened_system(server.url, Path(folder), registry_interval_s=0.5) as system:
            await system.ask([_part(NUM_REQUESTS)])  # Redis gets to know the scripts
            images = [_part(index) for index in range(NUM_REQUESTS)]
            return [
                await _count(system, "text", ["hello"] * NUM_REQUESTS),
                await _count(system, "new image", [[image] for image in images]),
                await _count(system, "known image", [[image] for image in images]),
            ]


def _part(index: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image_bytes(index))}}


async def _count(system: System, kind: str, contents: list[Any]) -> RedisCounts:
    await asyncio.sleep(SETTLE_S)
    with _counting(system.gateway.settings.instance) as written:
        for content in contents:
            await system.ask(content)
        await asyncio.sleep(SETTLE_S)
    num = len(contents)
    commands = {name: count / num for name, count in written.commands.most_common()}
    return RedisCounts(kind, written.num_writes / num, commands)
