"""Run commands on Redis with time limits and retries.

Limits and repetitions are ours, around whole commands (`run_command`), not redis-py's:
- its `socket_timeout` sends through `asyncio.wait_for`, which before Python 3.12 can swallow the
  cancellation of its caller;
- its retries nest (connect, handshake, health check, command), so that a wrong password takes
  seconds to be reported;
- a blocking XREADGROUP must never be repeated silently: the first one may have been answered after
  we gave up, and its entry would stay pending.
A connection that broke while idle is noticed when it is taken from the pool (TCP keep-alive is on).
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

from redis import exceptions
from redis.asyncio import Redis
from redis.backoff import ExponentialWithJitterBackoff

from triptych_common.domain.errors import BusRefusedError, BusUnavailableError

SETTING = "TRIPTYCH_REDIS_URL"
PASSING = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ClusterError, OSError)
_CUT_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError)

COMMAND_LIMIT_S = 5.0  # one command, all attempts and connecting included
BACKOFF_BASE_S = 0.02
BACKOFF_CAP_S = 1.0
BLOCK_MS = 1000  # of one XREADGROUP
READ_LIMIT_S = BLOCK_MS / 1000 + COMMAND_LIMIT_S  # of the same: must exceed BLOCK
SCAN_BATCH = 500  # keys that one SCAN looks at

T = TypeVar("T")


def is_passing(error: BaseException) -> bool:
    """Return whether the same command can work in a moment, on a new connection."""
    if refusal(error) is not None:
        return False
    return isinstance(error, PASSING)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Redis refuses writes for lack of memory; reads, acks and deletions still work."""
    return isinstance(error, exceptions.OutOfMemoryError) or "OOM command not allowed" in str(error)


def refusal(error: BaseException) -> str | None:
    """Return why Redis will refuse until a setting is changed, or None."""
    for cause in _chain(error):
        if isinstance(cause, exceptions.NoPermissionError):
            return f"the user of {SETTING} lacks a right: {cause}"
        if isinstance(cause, exceptions.AuthenticationError):
            if getattr(cause, "status_code", None) == "NOAUTH":
                return f"Redis asks for a password, and {SETTING} has none"
            return f"Redis refused the user name or password in {SETTING}"
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = getattr(cause, "verify_message", cause)
            return f"Redis' certificate is not trusted ({why}): see ssl_ca_certs in {SETTING}"
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, _CUT_OFF):
            why = getattr(cause, "reason", None) or cause
            return f"TLS with Redis failed ({why}): see the ssl_ options in {SETTING}"
    return None


def unavailable(action: str, error: BaseException) -> BusUnavailableError:
    if (reason := refusal(error)) is not None:
        return BusRefusedError(f"{action}: {reason}")
    if is_out_of_memory(error):
        return BusUnavailableError(f"{action}: Redis is out of memory (maxmemory), and takes nothing new")
    return BusUnavailableError(f"{action}: {str(error) or type(error).__name__}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and its causes. redis-py wraps a handshake's errors, not always as the cause."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


async def run_command(
    action: str, call: Callable[[], Awaitable[T]], *, retry_for_s: float | None = None
) -> T:
    """Await `call()`, and retry broken connections for at most `COMMAND_LIMIT_S`.

    A reply that is slow is waited for, never asked for twice.

    Args:
        retry_for_s: seconds of retries; 0: none; None: as long as the limit allows.

    Raises:
        BusRefusedError: login, rights or certificate are wrong; at once.
        BusUnavailableError: whatever redis-py raised, or it took too long. It may have been done.
    """
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + (COMMAND_LIMIT_S if retry_for_s is None else retry_for_s)
    backoff, num_failures = reconnect_backoff(), 0
    failure: BaseException | None = None
    try:
        async with asyncio.timeout(COMMAND_LIMIT_S):
            while True:
                try:
                    return await call()
                except (exceptions.RedisError, OSError) as error:
                    if not is_passing(error):
                        raise
                    failure = error
                num_failures += 1
                wait_s = backoff.compute(num_failures)
                if clock() + wait_s > give_up_at:
                    raise failure
                await asyncio.sleep(wait_s)
    except TimeoutError as error:
        if failure is None:
            raise BusUnavailableError(f"{action}: no answer from Redis in {COMMAND_LIMIT_S} s") from error
        raise unavailable(action, failure) from error
    except (exceptions.RedisError, OSError) as error:
        raise unavailable(action, error) from error


async def send_command(client: Redis, *arguments: str | bytes | int) -> Any:
    """Send one command as Redis' documentation writes it; redis-py's types leave its reply open."""
    return await cast("Any", client).execute_command(*arguments)


async def unlink_all(client: Redis, keys: Iterable[str | bytes]) -> None:
    """Delete keys, one by one: of Redis Cluster they may be on different servers."""
    async with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.execute_command("UNLINK", key)
        await pipe.execute()


async def find_keys(client: Redis, pattern: str, of_type: str | None = None) -> set[bytes]:
    """Return all keys that match `pattern`, of one type ("stream") or of all.

    Raises:
        redis.exceptions.ConnectionError: the nodes of a cluster changed meanwhile, which redis-py reports
            by a KeyError of the node's address. `run_command` asks again.
    """
    try:
        return {key async for key in client.scan_iter(match=pattern, count=SCAN_BATCH, _type=of_type)}
    except KeyError as error:
        raise exceptions.ConnectionError(f"the cluster changed while its keys were read: {error}") from error


async def read_time(client: Redis, key: str) -> list[int]:
    """Return seconds and microseconds of the clock of the server that holds `key`."""
    found: list[int] = await send_command(client, "EVAL", "return redis.call('TIME')", 1, key)
    return [int(each) for each in found]


def reconnect_backoff() -> ExponentialWithJitterBackoff:
    """Return the wait in seconds before attempt n, by `compute(n)`.

    redis-py's own class: a retry library would wrap these loops in more code than it takes away, since each
    of them does more than repeat one call.
    """
    return ExponentialWithJitterBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S)


def is_missing_group(error: exceptions.ResponseError) -> bool:
    """Return whether stream or group is gone: Redis lost its data, or they were deleted."""
    return str(error).startswith("NOGROUP")


def is_existing_group(error: exceptions.ResponseError) -> bool:
    return str(error).startswith("BUSYGROUP")
