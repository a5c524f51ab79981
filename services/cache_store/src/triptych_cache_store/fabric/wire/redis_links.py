"""Opens channels through Redis: streams and the connections to them. Blocking, for threads."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from triptych_cache_store.fabric.wire.redis_channel import (
    GROUP,
    TTL_TIMEOUTS,
    LinkStreams,
    RedisChannel,
    link_lost,
)
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.names import StreamNames
from triptych_common.redis_client.address import RedisAddress
from triptych_common.redis_client.blocking import blocking_client
from triptych_common.redis_client.polled import Command, PolledConnection


@dataclass(frozen=True)
class RedisLinks:
    """Opens channels through one deployment's Redis; methods block for at most `timeout_s`."""

    address: RedisAddress
    names: StreamNames
    client_name: str
    timeout_s: float

    def create(self, link_id: str) -> "RedisChannel":
        """Create the source's channel with new streams; raises ChannelError."""
        streams = LinkStreams(self.names.link(link_id, "source"), self.names.link(link_id, "target"))
        return self._open(link_id, streams, is_source=True)

    def attach(self, link_id: str) -> "RedisChannel":
        """Open the target's channel on existing streams; raises ChannelError."""
        streams = LinkStreams(self.names.link(link_id, "target"), self.names.link(link_id, "source"))
        return self._open(link_id, streams, is_source=False)

    def _open(self, link_id: str, streams: LinkStreams, *, is_source: bool) -> "RedisChannel":
        reader, writer = self._connection(link_id), self._connection(link_id)
        ttl_ms = int(1000 * TTL_TIMEOUTS * self.timeout_s)
        try:
            reader.open()
            writer.open()
            if is_source:
                writer.send(_create(streams, ttl_ms))
                writer.read_all()
            return RedisChannel(reader, writer, streams, f"redis {link_id}".encode(), ttl_ms)
        except BaseException as error:
            reader.close()
            writer.close()
            if isinstance(error, BusUnavailableError):
                raise link_lost(error) from error
            raise

    def _connection(self, link_id: str) -> PolledConnection:
        name = f"{self.client_name}/{link_id[:8]}"
        return PolledConnection(blocking_client(self.address, name, socket_timeout_s=self.timeout_s))


def _create(streams: LinkStreams, ttl_ms: int) -> list[Command]:
    commands: list[Command] = [("MULTI",)]
    for key in (streams.incoming, streams.outgoing):
        commands += [("XGROUP", "CREATE", key, GROUP, "0", "MKSTREAM"), ("PEXPIRE", key, ttl_ms)]
    return [*commands, ("EXEC",)]


async def open_in_thread(make: Callable[[], RedisChannel]) -> RedisChannel:
    """Run the blocking `make` in a thread; its channel is closed if the caller is cancelled meanwhile.

    Raises:
        ChannelError
    """
    making = asyncio.get_running_loop().run_in_executor(None, make)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close_made)
        raise


def close_in_thread(channel: RedisChannel) -> None:
    """Close in a thread, because closing waits for Redis."""
    asyncio.get_running_loop().run_in_executor(None, channel.close)


def _close_made(making: "asyncio.Future[RedisChannel]") -> None:
    if not making.cancelled() and making.exception() is None:
        close_in_thread(making.result())
