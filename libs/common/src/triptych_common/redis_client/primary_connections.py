"""Connections to the primary, dropped when their server does not take writes.

A primary that was demoted, a replica, or a server that still loads its data answers READONLY,
MASTERDOWN or TRYAGAIN. The remedy is the same as for a lost connection: connect again, a little later,
to whatever the address then means. (LOADING redis-py takes for a lost connection by itself.)

A connection that was reset while it was idle is one, too: redis-py notices an orderly end only, and
uvloop refuses to write to such a connection with an error that is none of the connection's.
"""

from typing import Any, cast

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MasterDownError, ReadOnlyError, ResponseError, TryAgainError

_NOT_PRIMARY = (ReadOnlyError, MasterDownError, TryAgainError)


class _PrimaryOnly(AbstractConnection):
    """Mixin of redis-py's connections that drops one whose server does not take writes."""

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        if self._writer is not None and self._writer.transport.is_closing():
            await self.disconnect(nowait=True)
            raise RedisConnectionError("the connection to Redis was lost while it was idle")
        await super().send_packed_command(*args, **options)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except _NOT_PRIMARY as error:
            await self.disconnect(nowait=True)
            raise RedisConnectionError(f"this Redis takes no writes now: {error}") from error
        except ResponseError as error:
            if "-READONLY" not in str(error):
                raise
            await self.disconnect(nowait=True)  # a script met it; before Redis 7 it has no class of its own
            raise RedisConnectionError(f"this Redis takes no writes now: {error}") from error


class TcpLink(_PrimaryOnly, Connection): ...


class TlsLink(_PrimaryOnly, SSLConnection): ...


class UnixLink(_PrimaryOnly, UnixDomainSocketConnection): ...


class _SentinelLink(_PrimaryOnly, SentinelManagedConnection): ...


class _SentinelTlsLink(_PrimaryOnly, SentinelManagedSSLConnection): ...


LINKS: dict[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: TcpLink,
    SSLConnection: TlsLink,
    UnixDomainSocketConnection: UnixLink,
}
"""Connection classes here, by the class that redis-py derives from a URL."""


class SentinelPool(SentinelConnectionPool):
    """Asks the sentinels for the primary with each new connection; closes their connections with its own."""

    def __init__(self, service: str, sentinel: Sentinel, *, is_tls: bool, **options: Any) -> None:
        options["connection_class"] = _SentinelTlsLink if is_tls else _SentinelLink
        cast("Any", super()).__init__(service, sentinel, **options)

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:  # closing, not a change of the primary
            await self.sentinel_manager.aclose()
