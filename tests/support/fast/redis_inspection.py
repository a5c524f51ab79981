"""What is in the Redis of a test's system, read without taking part."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import orjson
import redis
from redis.cluster import ClusterNode
from redis.exceptions import RedisClusterException, RedisError

from tests.support.fast.layout import DEPLOYMENT
from triptych_common.protocol.names import StreamNames

LIMIT_S = 60.0


class RedisServer(Protocol):
    """Starts, stops and freezes; `tests.conftest.EmbeddedRedis`."""

    url: str

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...


@contextmanager
def _client(url: str) -> Iterator[Any]:
    if url.startswith("redis+cluster://"):
        hosts = url.removeprefix("redis+cluster://").split(",")
        nodes = [cast("Any", ClusterNode)(*each.split(":")) for each in hosts]
        client: Any = redis.RedisCluster(startup_nodes=nodes, socket_timeout=LIMIT_S)
    else:
        client = redis.Redis.from_url(url, socket_timeout=LIMIT_S)
    try:
        yield client
    except RedisClusterException as error:  # redis-py has it beside its errors
        raise RedisError(str(error)) from error
    finally:
        client.close()


def _streams(client: Any, pattern: str) -> set[bytes]:
    try:
        return set(client.scan_iter(match=pattern, _type="stream"))
    except KeyError as error:  # redis-py's: the cluster's nodes changed meanwhile
        raise RedisError(f"the cluster changed while its keys were read: {error}") from error


def stream_leftovers(url: str, deployment: str = DEPLOYMENT) -> dict[str, int]:
    """Entries that are in a stream, or pending in a group. Handled ones are deleted.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    found: dict[str, int] = {}
    prefix = f"triptych:{deployment}:"
    with _client(url) as client:
        for key in _streams(client, f"{prefix}*"):
            name = key.decode().removeprefix(prefix)
            found[f"entries in {name}"] = client.xlen(key)
            for group in client.xinfo_groups(key):
                found[f"pending in {name}"] = group["pending"]
    return {what: number for what, number in found.items() if number}


def registered_records(url: str, deployment: str, instances: Iterable[str]) -> dict[str, dict[str, Any]]:
    """By instance, of those that are registered.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    names = StreamNames(deployment)
    found: dict[str, dict[str, Any]] = {}
    with _client(url) as client:
        for instance in instances:
            value = client.get(names.instance(instance))
            if value is not None:
                found[instance] = orjson.loads(value)["record"]
    return found


def registered_boots(url: str, instances: Iterable[str]) -> dict[str, str]:
    """Boot id by instance, of those of `FastSystem` that are registered.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    records = registered_records(url, DEPLOYMENT, instances)
    return {instance: record["boot_id"] for instance, record in records.items()}


def used_bytes(url: str) -> int:
    """Memory, as Redis counts it."""
    with _client(url) as client:
        return int(client.info("memory")["used_memory"])
