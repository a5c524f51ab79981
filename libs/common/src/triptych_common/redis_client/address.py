"""Address of Redis: its URL, and clients made from it.

    redis://[user:password@]host[:port][/database]           TCP; an IPv6 address in brackets
    rediss://...                                             the same by TLS
    unix://[user:password@]/path[?db=1]                      Unix socket
    redis+sentinel://[...@]host[:port],...[:...]/service[/database]   the primary that sentinels name
    rediss+sentinel://...                                    the same, Redis by TLS
    redis+cluster://[...@]host[:port],...[:...]              Redis Cluster that these servers belong to
    rediss+cluster://...                                     the same by TLS

Options go into the query. Timeouts are not among them: this package sets them
(a socket timeout below the block time of a read would send reads twice).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MasterDownError, ReadOnlyError, ResponseError, TryAgainError

from triptych_common.redis_client.cluster import ClusterClient
from triptych_common.redis_client.server_watch import CONNECT_TIMEOUT_S, ServerWatch

_NOT_PRIMARY = (ReadOnlyError, MasterDownError, TryAgainError)

SENTINEL_TIMEOUT_S = 1.0  # a sentinel that hangs; the next one is asked
SCHEMES = (
    "redis://", "rediss://", "unix://",
    "redis+sentinel://", "rediss+sentinel://", "redis+cluster://", "rediss+cluster://",
)  # fmt: skip
FILE_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_SENTINEL_PORT, _REDIS_PORT = 26379, 6379
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
_OPTIONS = frozenset({"db", "ssl_check_hostname", "ssl_password", *FILE_OPTIONS, *_SENTINEL_OPTIONS})


class _PrimaryOnly(AbstractConnection):
    """Mixin of redis-py's connections that drops one whose server does not take writes.

    A primary that was demoted, a replica, or a server that still loads its data answers READONLY, MASTERDOWN
    or TRYAGAIN. The remedy is the same as for a lost connection: connect again, a little later, to whatever
    the address then means. (LOADING redis-py takes for a lost connection by itself.) A connection that was
    reset while it was idle is one, too: redis-py notices an orderly end only, and uvloop refuses to write to
    such a connection with an error that is none of the connection's.
    """

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


@dataclass(frozen=True)
class RedisAddress:
    """Parsed URL of Redis; its text holds no secret."""

    options: Mapping[str, Any] = field(repr=False)
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""
    nodes: tuple[tuple[str, int], ...] = ()  # of a cluster; the first that answers names the others

    @classmethod
    def parse(cls, url: str) -> "RedisAddress":
        """Parse `url`. Raises ValueError: it cannot be used; the text names the part, and no secret."""
        if not url.startswith(SCHEMES):
            raise ValueError(
                "must start with redis://, rediss:// or unix://, or be one for sentinels or a cluster"
            )
        try:
            parts = urlsplit(url)
            names = {name for name, _ in parse_qsl(parts.query)}
        except ValueError:
            raise ValueError(
                "is not a URL; special characters of a password must be percent-encoded"
            ) from None
        if unknown := sorted(names - _OPTIONS):
            raise ValueError(f"has an unknown option: {unknown[0][:50]}")
        if "+sentinel" in parts.scheme:
            return cls._of_sentinels(url)
        if "+cluster" in parts.scheme:
            return cls._of_cluster(url)
        return cls(_checked(url))

    @classmethod
    def _of_sentinels(cls, url: str) -> "RedisAddress":
        parts = urlsplit(url)
        login, _, hosts = parts.netloc.rpartition("@")
        service, _, database = parts.path.strip("/").partition("/")
        if not service or not hosts:
            raise ValueError("needs hosts and a service: redis+sentinel://host:26379,host:26379/service")
        scheme = parts.scheme.removesuffix("+sentinel")
        plain = f"{scheme}://{login}@localhost/{database}" if login else f"{scheme}://localhost/{database}"
        options = _checked(f"{plain}?{parts.query}" if parts.query else plain)
        return cls(options, _hosts_and_ports(hosts, "sentinel", _SENTINEL_PORT), service)

    @classmethod
    def _of_cluster(cls, url: str) -> "RedisAddress":
        parts = urlsplit(url)
        login, _, hosts = parts.netloc.rpartition("@")
        if not hosts:
            raise ValueError("needs hosts of the cluster: redis+cluster://host:6379,host:6379")
        plain = f"{parts.scheme.removesuffix('+cluster')}://{login}@localhost?{parts.query}"
        options = _checked(plain if login else plain.replace("://@", "://"))
        if parts.path.strip("/") or options.get("db"):
            raise ValueError("names a database, which Redis Cluster has not")
        nodes = _hosts_and_ports(hosts, "cluster", _REDIS_PORT)
        return cls({key: value for key, value in options.items() if key != "host"}, nodes=nodes)

    def client(self, client_name: str, watch: ServerWatch) -> Redis:
        """Return a client that connects on first use and retries nothing by itself."""
        given = self.given_to_redis(client_name, Retry(NoBackoff(), 0), socket_timeout_s=None)
        link_class = LINKS[given.link_class]
        options = {**given.options, "redis_connect_func": watch.on_connect}
        if link_class is not UnixLink:
            options["socket_keepalive"] = True
        if self.nodes:
            return cast(
                "Redis", ClusterClient(self.nodes, watch, connection_class=link_class, **given.options)
            )
        if not self.service:
            return Redis.from_pool(ConnectionPool(connection_class=link_class, **options))
        sentinel = cast("Any", Sentinel)(self.sentinels, sentinel_kwargs=given.sentinel_options)
        return Redis.from_pool(SentinelPool(self.service, sentinel, is_tls=link_class is TlsLink, **options))

    def given_to_redis(
        self, client_name: str, retry: object, *, socket_timeout_s: float | None
    ) -> "GivenToRedis":
        """Return the options of a client; `retry` is redis-py's, of the client's kind."""
        options = dict(self.options)
        link_class = options.pop("connection_class", Connection)
        sentinel_options = {
            name.removeprefix("sentinel_"): options.pop(name) for name in _SENTINEL_OPTIONS if name in options
        }
        if self.service:  # the sentinels know where it is
            options = {name: value for name, value in options.items() if name not in ("host", "port")}
        ours = {
            "decode_responses": False,
            "protocol": 2,
            "client_name": client_name.replace(" ", "_"),
            "driver_info": None,
            "socket_timeout": socket_timeout_s,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "retry": retry,
        }
        for_sentinels = {
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
            "socket_timeout": SENTINEL_TIMEOUT_S,
            "retry": retry,
        }
        return GivenToRedis(link_class, {**options, **ours}, {**for_sentinels, **sentinel_options})


@dataclass(frozen=True)
class GivenToRedis:
    """Address as redis-py takes it: options of the connections to Redis, and of those to sentinels."""

    link_class: Any  # as `parse_url` derives it from the URL
    options: Mapping[str, Any] = field(repr=False)
    sentinel_options: Mapping[str, Any] = field(repr=False)


def _checked(url: str) -> Mapping[str, Any]:
    try:
        options = dict(parse_url(url))
    except ValueError as error:
        raise ValueError(f"cannot be used: {error}") from None
    is_tls = url.startswith("rediss")
    for name in sorted(options):
        if name.startswith("ssl_") and not is_tls:
            raise ValueError(f"has {name}, which is for rediss:// only")
    for name in FILE_OPTIONS:
        path = options.get(name)
        if path is not None and not Path(str(path)).is_file():
            raise ValueError(f"{name}: there is no file {path}")
    if options.get("connection_class") is UnixDomainSocketConnection and not options.get("path"):
        raise ValueError("needs the path of a socket: unix:///run/redis.sock")
    return options


def _hosts_and_ports(text: str, what: str, port: int) -> tuple[tuple[str, int], ...]:
    return tuple(_host_and_port(each, what, port) for each in text.split(","))


def _host_and_port(text: str, what: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise ValueError(f"{text[:100]} is not a {what}'s host and port")
    return host, port or default_port
