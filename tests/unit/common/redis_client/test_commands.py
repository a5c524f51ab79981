"""Errors that redis-py raises outside its own hierarchy become errors of Redis."""

from typing import Any

import pytest
from redis import exceptions
from redis.asyncio import RedisCluster

from triptych_common.redis_client.commands import find_keys, is_passing


class _FailedOver(RedisCluster):
    """Its primary is replaced between two SCANs: redis-py looks for the old one's name in the answer."""

    def __init__(self) -> None: ...

    def __del__(self, *_: Any) -> None: ...

    def get_node(self, *_: Any, **__: Any) -> Any:
        return None

    async def scan(self, cursor: int = 0, *_: Any, **__: Any) -> Any:
        return ({"127.0.0.1:2": 0}, [b"b"]) if cursor else ({"127.0.0.1:1": 7}, [b"a"])


async def test_a_failover_amid_a_scan_is_asked_again() -> None:
    with pytest.raises(exceptions.ConnectionError, match="cluster changed") as raised:
        await find_keys(_FailedOver(), "*")
    assert is_passing(raised.value)
