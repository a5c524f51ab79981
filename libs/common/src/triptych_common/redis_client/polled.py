"""Connection to Redis for a thread that polls: commands are sent ahead, replies are read later."""

import contextlib
import socket
from collections.abc import Sequence
from typing import Any, cast

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from triptych_common.redis_client.commands import is_missing_group
from triptych_common.redis_client.failures import unavailable

Argument = str | bytes | int
Command = tuple[Argument, ...]


class PolledConnection:
    """Polled use of a `blocking_client` that has no other user. For one thread."""

    def __init__(self, client: Redis) -> None:
        self._pool = cast("Any", client.connection_pool)
        self._connection: Any = None
        self._num_unanswered = 0

    def open(self) -> None:
        """Connect. Raises BusUnavailableError: Redis cannot be reached, or refuses the login."""
        try:
            self._connection = self._pool.get_connection()
        except (RedisError, OSError) as error:
            raise unavailable("connect", error) from error

    def fileno(self) -> int:
        """Return the descriptor to poll for reading after `read_replies` has read all replies."""
        sock: socket.socket = self._connection._sock  # noqa: SLF001 - redis-py has no other way to poll
        return sock.fileno()

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands, whose replies come in this order; wait for Redis within the client's timeout.

        Raises:
            BusUnavailableError: the connection is of no use any more.
        """
        try:
            self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
        except (RedisError, OSError) as error:
            raise unavailable("send", error) from error
        self._num_unanswered += len(commands)

    def read_replies(self) -> list[Any]:
        """Return the replies that have begun to arrive; None for a stream that is gone.

        Raises:
            BusUnavailableError: the connection is of no use any more, or Redis refuses a command.
        """
        replies: list[Any] = []
        try:
            while self._connection.can_read(timeout=0):
                replies.append(self._read())
        except (RedisError, OSError) as error:
            raise unavailable("read", error) from error
        return replies

    def read_all(self) -> list[Any]:
        """Return the replies to all commands, waiting within the client's timeout.

        Raises:
            BusUnavailableError: as `read_replies`.
        """
        try:
            return [self._read() for _ in range(self._num_unanswered)]
        except (RedisError, OSError) as error:
            raise unavailable("read", error) from error

    def close(self) -> None:
        """Close the connection; may be called twice, and before `open`."""
        with contextlib.suppress(RedisError, OSError):
            self._pool.disconnect()

    def _read(self) -> Any:
        try:
            reply = self._connection.read_response(disconnect_on_error=False)
        except ResponseError as error:
            if not is_missing_group(error) and not str(error).startswith("UNBLOCKED"):
                raise
            reply = None
        self._num_unanswered -= 1
        return reply
