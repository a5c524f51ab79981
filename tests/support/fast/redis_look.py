"""What is in the Redis of a test's system, read without taking part."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import orjson
import redis

from support.fast.layout import DEPLOYMENT
from triptych_common.protocol.names import StreamNames

LIMIT_S = 5.0


class RedisServer(Protocol):
    """Starts, stops and freezes; `tests.conftest.EmbeddedRedis`."""

    url: str

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...


@contextmanager
def _client(url: str) -> Iterator[Any]:
    client = redis.Redis.from_url(url, socket_timeout=LIMIT_S)
    try:
        yield client
    finally:
        client.close()


def stream_leftovers(url: str) -> dict[str, int]:
    """Entries that are in a stream, or pending in a group. Handled ones are deleted.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    found: dict[str, int] = {}
    prefix = f"triptych:{DEPLOYMENT}:"
    with _client(url) as client:
        for key in client.scan_iter(match=f"{prefix}*", _type="stream"):
            name = key.decode().removeprefix(prefix)
            found[f"entries in {name}"] = client.xlen(key)
            for group in client.xinfo_groups(key):
                found[f"pending in {name}"] = group["pending"]
    return {what: number for what, number in found.items() if number}


def registered_boots(url: str, instances: Iterable[str]) -> dict[str, str]:
    """Boot id by instance, of those that are registered.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    names = StreamNames(DEPLOYMENT)
    found: dict[str, str] = {}
    with _client(url) as client:
        for instance in instances:
            value = client.get(names.instance(instance))
            if value is not None:
                found[instance] = orjson.loads(value)["record"]["boot_id"]
    return found


def used_bytes(url: str) -> int:
    """Memory, as Redis counts it."""
    with _client(url) as client:
        return int(client.info("memory")["used_memory"])
