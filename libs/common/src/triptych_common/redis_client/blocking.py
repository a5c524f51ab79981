"""Clients that block, for vLLM's workers and the fabric's threads, from the same addresses as the others."""

from typing import Any, cast

from redis import Connection, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio import connection as asynchronous
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.retry import Retry
from redis.sentinel import Sentinel

from triptych_common.redis_client.address import RedisAddress

_BLOCKING: dict[Any, Any] = {  # by the class that redis-py derives from a URL
    asynchronous.Connection: Connection,
    asynchronous.SSLConnection: SSLConnection,
    asynchronous.UnixDomainSocketConnection: UnixDomainSocketConnection,
}


def blocking_client(address: RedisAddress, client_name: str, *, socket_timeout_s: float) -> Redis:
    """Return a thread-safe client that connects on first use and retries nothing by itself.

    `socket_timeout_s`: seconds without any progress on the network.
    """
    given = address.given_to_redis(client_name, Retry(NoBackoff(), 0), socket_timeout_s=socket_timeout_s)
    link_class = _BLOCKING[given.link_class]
    if not address.service:
        return Redis.from_pool(ConnectionPool(connection_class=link_class, **given.options))
    sentinel = cast("Any", Sentinel)(address.sentinels, sentinel_kwargs=given.sentinel_options)
    client: Redis = sentinel.master_for(address.service, ssl=link_class is SSLConnection, **given.options)
    return client
