"""What is in the Redis of a test's system, read without taking part."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import orjson
import redis

from tests.support.fast.layout import DEPLOYMENT
from triptych_common.protocol.names import ENCODERS_GROUP, StreamNames, all_encode_jobs

LIMIT_S = 60.0
MAX_JOBS = 100


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


def stream_leftovers(url: str, deployment: str = DEPLOYMENT) -> dict[str, int]:
    """Entries that are in a stream, or pending in a group. Handled ones are deleted.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    found: dict[str, int] = {}
    prefix = f"triptych:{deployment}:"
    with _client(url) as client:
        for key in client.scan_iter(match=f"{prefix}*", _type="stream"):
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


def jobs_in_hand(url: str, deployment: str) -> dict[str, set[str]]:
    """mm_hashes of the encode jobs that were taken and are not done, by encoder.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    found: dict[str, set[str]] = defaultdict(set)
    with _client(url) as client:
        for stream in client.scan_iter(match=all_encode_jobs(StreamNames(deployment)), _type="stream"):
            for pending in client.xpending_range(stream, ENCODERS_GROUP, "-", "+", MAX_JOBS):
                for _, fields in client.xrange(stream, pending["message_id"], pending["message_id"]):
                    found[pending["consumer"].decode()].add(orjson.loads(fields[b"body"])["mm_hash"])
    return dict(found)


def used_bytes(url: str) -> int:
    """Memory, as Redis counts it."""
    with _client(url) as client:
        return int(client.info("memory")["used_memory"])
