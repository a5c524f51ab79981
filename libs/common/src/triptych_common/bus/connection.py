"""Connections to Redis: how long anything may take, how often it is tried again, what errors become.

Limits and repetitions are ours, around whole commands (`command`), not redis-py's:
- its `socket_timeout` sends through `asyncio.wait_for`, which before Python 3.12 can swallow the
  cancellation of its caller;
- its retries nest (connect, handshake, health check, command), so that a wrong password takes
  seconds to be told;
- a blocking XREADGROUP must never be repeated silently: the first one may have been answered after
  we gave up, and its entry would stay pending.
A connection that broke while idle is noticed when it is taken from the pool (TCP keep-alive is on).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff

from triptych_common.bus.server_watch import ServerWatch
from triptych_common.domain.errors import BusUnavailableError

CONNECT_TIMEOUT_S = 2.0
COMMAND_ATTEMPTS = 3
COMMAND_LIMIT_S = 5.0  # one command, all attempts and connecting included
BACKOFF_BASE_S = 0.02
BACKOFF_CAP_S = 1.0
BLOCK_MS = 1000  # of one XREADGROUP
READ_LIMIT_S = BLOCK_MS / 1000 + COMMAND_LIMIT_S  # of the same: must exceed BLOCK

T = TypeVar("T")


def command_client(url: str, client_name: str, watch: ServerWatch) -> Redis:
    """A client that connects on first use, and repeats nothing by itself.

    Raises:
        ValueError: `url` has an unknown scheme.
    """
    return Redis.from_url(
        url,
        decode_responses=False,
        protocol=2,
        client_name=client_name.replace(" ", "_"),
        driver_info=None,
        socket_timeout=None,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        redis_connect_func=watch.on_connect,
    )


async def command(action: str, call: Callable[[], Awaitable[T]]) -> T:
    """Await `call()`, again when the connection breaks, for at most `COMMAND_LIMIT_S` in all.

    Raises:
        BusUnavailableError: whatever redis-py raised, or it took too long. It may have been done.
    """
    backoff = reconnect_backoff()
    attempt = 1
    try:
        async with asyncio.timeout(COMMAND_LIMIT_S):
            while True:
                try:
                    return await call()
                except exceptions.ConnectionError as error:
                    if attempt == COMMAND_ATTEMPTS or _is_refused_login(error):
                        raise
                await asyncio.sleep(backoff.compute(attempt))
                attempt += 1
    except TimeoutError as error:
        raise BusUnavailableError(f"{action}: no answer from Redis in {COMMAND_LIMIT_S} s") from error
    except (exceptions.RedisError, OSError) as error:
        if _is_refused_login(error):
            raise BusUnavailableError(f"{action}: Redis refused the user name or password") from error
        raise BusUnavailableError(f"{action}: {str(error) or type(error).__name__}") from error


async def execute(client: Redis, *arguments: str | bytes | int) -> Any:
    """One command as it is written in Redis' documentation; redis-py's types say nothing of its reply."""
    return await cast("Any", client).execute_command(*arguments)


def reconnect_backoff() -> ExponentialWithJitterBackoff:
    """Seconds to wait before attempt n: `compute(n)`."""
    return ExponentialWithJitterBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S)


def is_missing_group(error: exceptions.ResponseError) -> bool:
    """Whether the stream or its group is gone: Redis lost its data, or somebody deleted them."""
    return str(error).startswith("NOGROUP")


def is_existing_group(error: exceptions.ResponseError) -> bool:
    return str(error).startswith("BUSYGROUP")


def _is_refused_login(error: BaseException) -> bool:
    """redis-py sometimes wraps what happened in the handshake."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, exceptions.AuthenticationError):
            return True
        cause = cause.__cause__
    return False
