"""Rights that a user of Redis needs: every command that this package sends, and no others.

The one list: the rule in docs/reference/configuration.md, the check at a service's start (`find_missing`)
and the tests are made from it. Commands that Lua scripts call count, too: Redis asks the script's caller for
the right.
"""

from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from triptych_common.domain.errors import BusRefusedError
from triptych_common.protocol.names import StreamNames, everything
from triptych_common.redis_client.commands import SETTING

_UNQUEUABLE = ["GET"]  # without its key
_OPENS, _ENDS = "multi", "exec"


@dataclass(frozen=True)
class Right:
    """Right to run one command.

    `sample`: arguments of a call that Redis takes; `KEY` stands for a key of the deployment.
    `without`: the feature that is lost without this right; empty: services do not start.
    """

    command: str  # as a rule of the ACL has it: `xadd`, `xgroup|create`
    sample: str
    used_for: str
    without: str = ""

    @property
    def call(self) -> list[str]:
        return [*self.command.upper().split("|"), *self.sample.split()]


_SCRIPTS, _STREAMS, _JOBS, _RECORDS = "scripts", "streams", "jobs and flights", "records of instances"
_SIZES, _TENSORS, _EXPIRY, _TOOLS = (
    "placeholder sizes, directory of entries",
    "transport `redis`",
    "expiry",
    "operators' tools",
)
_LIMITS, _RESPONSES = "limits of API keys", "stored responses, items by `uuid`"

RIGHTS: tuple[Right, ...] = (
    Right("client|setname", "triptych", "names of connections"),
    Right("select", "0", "another database than 0", "only database 0 can be used"),
    Right(
        "info", "server", "noticing another Redis", "a restart of a Redis that kept its data is not noticed"
    ),
    Right("time", "", "Redis' clock"),
    Right("cluster|slots", "", "Redis Cluster", "a cluster cannot be used"),
    Right("multi", "", "the check of these rights"),
    Right("exec", "", "the check of these rights"),
    Right("eval", "return 0", _SCRIPTS),
    Right("evalsha", "0000000000000000000000000000000000000000 0", _SCRIPTS),
    Right("script|load", "return", _SCRIPTS),
    Right("xadd", "KEY * f v", _STREAMS),
    Right("xlen", "KEY", _STREAMS),
    Right("xrange", "KEY - +", _STREAMS),
    Right("xreadgroup", "GROUP g c STREAMS KEY >", _STREAMS),
    Right("xack", "KEY g 1-1", _STREAMS),
    Right("xdel", "KEY 1-1", _STREAMS),
    Right("xpending", "KEY g", _STREAMS),
    Right("xclaim", "KEY g c 1 1-1", _STREAMS),
    Right("xgroup|create", "KEY g 0", _STREAMS),
    Right("xgroup|delconsumer", "KEY g c", _JOBS),
    Right("xinfo|groups", "KEY", _JOBS),
    Right("xinfo|consumers", "KEY g", _JOBS),
    Right("hset", "KEY f v", f"{_JOBS}, {_SIZES}, {_LIMITS}"),
    Right("hget", "KEY f", f"{_SIZES}, {_LIMITS}"),
    Right("hmget", "KEY f", _JOBS),
    Right("hgetall", "KEY", f"{_JOBS}, {_LIMITS}"),
    Right("hdel", "KEY f", f"{_JOBS}, {_SIZES}, {_LIMITS}"),
    Right("hlen", "KEY", f"{_SIZES}, {_LIMITS}"),
    Right("rpush", "KEY v", _SIZES),
    Right("lpop", "KEY 1", _SIZES),
    Right("get", "KEY", f"{_RECORDS}, {_TENSORS}, {_RESPONSES}"),
    Right("set", "KEY v", f"{_RECORDS}, {_TENSORS}, {_RESPONSES}"),
    Right("mget", "KEY", _RECORDS),
    Right("strlen", "KEY", _TENSORS),
    Right("zadd", "KEY 1 m", _RECORDS),
    Right("zrange", "KEY 0 1", _RECORDS),
    Right("zrangebyscore", "KEY 0 1", _RECORDS),
    Right("zrem", "KEY m", _RECORDS),
    Right("exists", "KEY", _RECORDS),
    Right("del", "KEY", "flights, records of instances"),
    Right("unlink", "KEY", "streams of instances that ended"),
    Right("expire", "KEY 1", _EXPIRY),
    Right("pexpire", "KEY 1", _EXPIRY),
    Right("pexpireat", "KEY 1", _EXPIRY),
    Right("pttl", "KEY", _EXPIRY),
    Right("scan", "0", _TOOLS, "`streams lag`, and deleting a deployment, do not work"),
    Right("xrevrange", "KEY + -", _TOOLS, "`streams peek` and `streams dead` do not work"),
)


def keys_pattern(deployment: str) -> str:
    return f"~{everything(StreamNames(deployment))}"


def rules(deployment: str) -> tuple[str, ...]:
    """Return `ACL SETUSER` rules for a user that may do all that services and operators' tools do."""
    return (keys_pattern(deployment), *(f"+{right.command}" for right in RIGHTS))


async def find_missing(client: Redis, names: StreamNames) -> tuple[Right, ...]:
    """Return the optional rights that are missing; required ones are all granted.

    No command is run: a transaction is opened, all commands are queued in it, and it is thrown away. Redis
    asks for the right when a command is queued. One that cannot be queued at all stands first, so that not
    even `EXEC` would run them.

    Raises:
        BusRefusedError: a required right is missing; the error names all that are.
        RedisError, OSError: Redis cannot be asked.
    """
    pool: Any = client.connection_pool
    connection = await pool.get_connection()
    try:
        missing, is_outside = await _try_all(connection, names)
    finally:
        await connection.disconnect()  # with the transaction
        await pool.release(connection)
    needed = [f"+{right.command}" for right in missing if not right.without]
    if is_outside:
        needed.append(keys_pattern(names.deployment))
    if needed:
        raise BusRefusedError(f"connect: the user of {SETTING} lacks a right: {' '.join(needed)}")
    return tuple(missing)


async def _try_all(connection: Any, names: StreamNames) -> tuple[list[Right], bool]:
    """Return the missing rights, and whether the deployment's keys are closed to this user."""
    opens = next(right for right in RIGHTS if right.command == _OPENS)
    await connection.send_command(*opens.call)
    try:
        await connection.read_response()
    except NoPermissionError:
        return [opens], False  # without a transaction nothing may be tried: it would be run
    await connection.send_command(*_UNQUEUABLE)
    await _read(connection)
    tried = sorted((each for each in RIGHTS if each is not opens), key=lambda each: each.command == _ENDS)
    key = names.dead_letters
    calls = [[key if each == "KEY" else each for each in right.call] for right in tried]
    await connection.send_packed_command(connection.pack_commands(calls))
    missing: list[Right] = []
    is_outside = False
    for right in tried:
        error = await _read(connection)
        if error is not None and _is_of_key(error):
            is_outside = True
        elif error is not None:
            missing.append(right)
    return sorted(missing, key=RIGHTS.index), is_outside


async def _read(connection: Any) -> ResponseError | None:
    """Return the reply if it is a refusal. Other errors, such as out of memory, are not about rights."""
    try:
        await connection.read_response()
    except NoPermissionError as error:
        return error
    except ResponseError as error:
        return error if "NOPERM" in str(error) else None  # of `EXEC`, whose own error holds the reason
    return None


def _is_of_key(error: ResponseError) -> bool:
    """Match Redis 6's "no permissions to access one of the keys" and 7's "No permissions to access a key"."""
    return "permissions to access" in str(error)
