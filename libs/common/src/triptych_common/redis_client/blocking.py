"""Clients that block, for vLLM's workers and the fabric's threads, from the same addresses as the others."""

import threading
from typing import Any, cast

from redis import Connection, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio import connection as asynchronous
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.crc import key_slot
from redis.exceptions import ClusterDownError, RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from triptych_common.redis_client.address import RedisAddress

_BLOCKING: dict[Any, Any] = {  # by the class that redis-py derives from a URL
    asynchronous.Connection: Connection,
    asynchronous.SSLConnection: SSLConnection,
    asynchronous.UnixDomainSocketConnection: UnixDomainSocketConnection,
}


class BlockingClients:
    """Clients that block, by key: one for all keys, or for each server of Redis Cluster. Thread-safe."""

    def __init__(self, address: RedisAddress, client_name: str, *, socket_timeout_s: float) -> None:
        """Store the address; `socket_timeout_s` is the seconds without any progress on the network."""
        self._address = address
        given = address.given_to_redis(client_name, Retry(NoBackoff(), 0), socket_timeout_s=socket_timeout_s)
        self._link_class, self._options = _BLOCKING[given.link_class], given.options
        self._servers: dict[tuple[str, int], Redis] = {}
        self._slots: list[tuple[int, int, tuple[str, int]]] = []  # first, last, their primary
        self._lock = threading.Lock()
        if address.service:
            sentinel = cast("Any", Sentinel)(address.sentinels, sentinel_kwargs=given.sentinel_options)
            is_tls = self._link_class is SSLConnection
            self._one: Redis | None = sentinel.master_for(address.service, ssl=is_tls, **given.options)
        else:
            self._one = None if address.nodes else self._client()

    def client_of(self, key: str) -> Redis:
        """Return the client of the server that holds `key`: it connects on first use and retries nothing.

        Raises:
            RedisError, OSError: no server of the cluster answers.
        """
        if self._one is not None:
            return self._one
        with self._lock:
            if not self._slots:
                self._slots = self._read_slots()
            slot = key_slot(key.encode())
            for first, last, server in self._slots:
                if first <= slot <= last:
                    return self._client_at(server)
        raise ClusterDownError(f"slot {slot} has no server")

    def reconnect(self) -> None:
        """Drop all connections: the address may mean another server, and a slot another one, now."""
        with self._lock:
            self._slots = []
            for each in [*self._servers.values(), *filter(None, [self._one])]:
                each.connection_pool.disconnect()

    def close(self) -> None:
        self.reconnect()

    def _client_at(self, server: tuple[str, int]) -> Redis:
        if server not in self._servers:
            self._servers[server] = self._client(host=server[0], port=server[1])
        return self._servers[server]

    def _client(self, **where: Any) -> Redis:
        return Redis.from_pool(
            ConnectionPool(connection_class=self._link_class, **{**self._options, **where})
        )

    def _read_slots(self) -> list[tuple[int, int, tuple[str, int]]]:
        failure: Exception | None = None
        for server in dict.fromkeys((*self._servers, *self._address.nodes)):
            try:
                reply = cast("Any", self._client_at(server)).execute_command("CLUSTER SLOTS")
            except (RedisError, OSError) as error:
                failure = error
                continue
            return [
                (first, last, (primary[0].decode() or server[0], primary[1]))
                for first, last, primary, *_ in reply
            ]
        raise failure or ClusterDownError("no server is named")
