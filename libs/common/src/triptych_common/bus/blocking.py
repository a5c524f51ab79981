"""Clients that block, for vLLM's workers, from the same addresses as the others."""

from typing import Any, cast

from redis import Connection, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio import connection as asynchronous
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.retry import Retry
from redis.sentinel import Sentinel

from triptych_common.bus.address import CONNECT_TIMEOUT_S, SENTINEL_TIMEOUT_S, RedisAddress

_SENTINEL = "sentinel_"
_BLOCKING: dict[Any, Any] = {  # by the class that redis-py derives from a URL
    asynchronous.Connection: Connection,
    asynchronous.SSLConnection: SSLConnection,
    asynchronous.UnixDomainSocketConnection: UnixDomainSocketConnection,
}


def blocking_client(address: RedisAddress, client_name: str, *, socket_timeout_s: float) -> Redis:
    """A client that connects on first use, and repeats nothing by itself. Thread-safe.

    `socket_timeout_s`: without any progress on the network.
    """
    given = dict(address.options)
    link_class = _BLOCKING[given.pop("connection_class", asynchronous.Connection)]
    options: dict[str, Any] = {
        **{name: value for name, value in given.items() if not name.startswith(_SENTINEL)},
        "decode_responses": False,
        "protocol": 2,
        "client_name": client_name.replace(" ", "_"),
        "driver_info": None,
        "socket_timeout": socket_timeout_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
    }
    if not address.service:
        return Redis.from_pool(ConnectionPool(connection_class=link_class, **options))
    for name in ("host", "port"):
        options.pop(name, None)
    sentinel = cast("Any", Sentinel)(
        address.sentinels,
        sentinel_kwargs={
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
            "socket_timeout": SENTINEL_TIMEOUT_S,
            "retry": Retry(NoBackoff(), 0),
            **{name.removeprefix(_SENTINEL): given[name] for name in given if name.startswith(_SENTINEL)},
        },
    )
    client: Redis = sentinel.master_for(address.service, ssl=link_class is SSLConnection, **options)
    return client
