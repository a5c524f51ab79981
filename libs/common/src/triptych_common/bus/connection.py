"""Connections to Redis: how long anything may take, how often it is tried again, what errors become.

Two kinds of client, because a repeated read is not harmless. Commands (publish, ack, …) are
idempotent or at-least-once, so redis-py may repeat them when the connection breaks. A blocking
XREADGROUP must not be repeated silently: the first one may have been answered after we gave up, and
its entry would stay pending.

Time limits are ours (`limited`), around whole commands, not redis-py's `socket_timeout`: that one
sends through `asyncio.wait_for`, which before Python 3.12 can swallow the cancellation of its caller.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from triptych_common.domain.errors import BusUnavailableError

CONNECT_TIMEOUT_S = 2.0         # one attempt
COMMAND_RETRIES = 2
COMMAND_LIMIT_S = 5.0           # one command, all attempts and connecting included
HEALTH_CHECK_INTERVAL_S = 15.0
BACKOFF_BASE_S = 0.02
BACKOFF_CAP_S = 1.0
BLOCK_MS = 1000                 # of one XREADGROUP
READ_LIMIT_S = BLOCK_MS / 1000 + COMMAND_LIMIT_S  # of the same: must exceed BLOCK


def command_client(url: str, client_name: str) -> Redis:
    """Client for everything but blocking reads. Connects on first use."""
    retry = Retry(ExponentialWithJitterBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S), COMMAND_RETRIES)
    return _client(url, client_name, retry)


def reader_client(url: str, client_name: str) -> Redis:
    """Client for one consumer's blocking reads, which are never repeated behind its back."""
    return _client(url, client_name, Retry(NoBackoff(), 0))


def reconnect_backoff() -> ExponentialWithJitterBackoff:
    """Seconds to wait before attempt n: `compute(n)`."""
    return ExponentialWithJitterBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S)


def _client(url: str, client_name: str, retry: Retry) -> Redis:
    return Redis.from_url(
        url,
        decode_responses=False,
        protocol=2,
        client_name=client_name.replace(" ", "_"),
        driver_info=None,
        socket_timeout=None,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        health_check_interval=HEALTH_CHECK_INTERVAL_S,
        retry=retry,
    )


@asynccontextmanager
async def limited(action: str) -> AsyncIterator[None]:
    """Body may take `COMMAND_LIMIT_S`; what redis-py raises in it becomes `BusUnavailableError`."""
    try:
        async with asyncio.timeout(COMMAND_LIMIT_S):
            yield
    except AuthenticationError as error:
        raise BusUnavailableError(f"{action}: Redis refused the user name or password") from error
    except (RedisError, OSError) as error:  # a TimeoutError is an OSError
        raise BusUnavailableError(f"{action}: {str(error) or type(error).__name__}") from error


def is_missing_group(error: ResponseError) -> bool:
    """Whether the stream or its group is gone: Redis lost its data, or somebody deleted them."""
    return str(error).startswith("NOGROUP")


def is_existing_group(error: ResponseError) -> bool:
    return str(error).startswith("BUSYGROUP")
