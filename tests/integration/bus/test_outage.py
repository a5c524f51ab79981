"""A Redis that stops, hangs and comes back, under a consumer, a publisher and a threaded bus."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import redis

from triptych_common.bus import AsyncBus, Registry, ThreadedBus
from triptych_common.bus import connection as bus_connection
from triptych_common.bus import group as bus_group
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeCompleted, InstanceRecord, Role

STREAM = "triptych:test:acks:e"
LIMIT_S = 15.0


class StoppableRedis(Protocol):
    url: str

    def stop(self) -> None: ...
    def start(self) -> None: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...


@pytest.fixture
def own_redis(own_redis_server: Callable[[], Any]) -> Iterator[Any]:
    server = own_redis_server()
    yield server
    server.stop()


def message(number: int) -> EncodeCompleted:
    return EncodeCompleted(job_id=f"job-{number}", mm_hash="ab" * 32, encoder="e", encode_s=0)
