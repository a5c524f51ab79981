"""Check that Redis grants every right in `rights`, without running any command.

A transaction is opened, all commands are queued in it, and it is thrown away: Redis asks for the right when
a command is queued. One that cannot be queued at all stands first, so that not even `EXEC` would run them.
"""

from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from triptych_common.domain.errors import BusRefusedError
from triptych_common.protocol.names import StreamNames
from triptych_common.redis_client.failures import SETTING
from triptych_common.redis_client.rights import RIGHTS, Right, keys_pattern

_UNQUEUABLE = ["GET"]  # without its key
_OPENS, _ENDS = "multi", "exec"


async def find_missing(client: Redis, names: StreamNames) -> tuple[Right, ...]:
    """Return the optional rights that are missing; required ones are all granted.

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
