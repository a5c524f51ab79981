"""Detect that Redis was restarted, failed over or emptied.

Every new connection asks for the server's run id, which no two lives of a Redis share. A run id that differs
from the last one, or a group that was there and is gone, is a change, and the callbacks are called. So is,
for a cluster, a server with another run id than it had, or another primary. A loss of
data cannot be excluded (a replica or a snapshot may lack the last second), so callers repeat the steps they
still wait for; everything on the streams is idempotent.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError

from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

CONNECT_TIMEOUT_S = 2.0

OnServerChanged = Callable[[], None]


class ServerWatch:
    """Watch of the server's run id, shared by all connections of one bus. Belongs to its event loop."""

    def __init__(self) -> None:
        self._callbacks: list[OnServerChanged] = []
        self.run_id: str | None = None  # None: not connected yet, or Redis does not let us ask
        self._node_run_ids: dict[tuple[str, int], str] = {}
        self._primaries: frozenset[str] = frozenset()

    def on_changed(self, callback: OnServerChanged) -> None:
        """Call `callback` at each change, on the bus's event loop. It must not block."""
        self._callbacks.append(callback)

    async def on_connect(self, connection: AbstractConnection) -> None:
        """Log in on a new connection, as redis-py would, and compare the server's run id."""
        await cast("Any", connection).on_connect()
        run_id = await _ask_run_id(connection)
        before, self.run_id = self.run_id, run_id or self.run_id
        if before is not None and run_id not in (None, before):
            self._notify("another run id")

    async def on_node_connect(self, connection: AbstractConnection) -> None:
        """Log in at one server of a cluster, and compare its run id; a server that hangs is given up.

        `run_id` is of no server then: it changes with each change that is noticed.
        """
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await cast("Any", connection).on_connect()
            run_id = await _ask_run_id(connection)
        address = cast("Any", connection).host, cast("Any", connection).port
        before = self._node_run_ids.get(address)
        if run_id is not None:
            self._node_run_ids[address] = run_id
        if before not in (None, run_id) and run_id is not None:
            self.run_id = run_id
            self._notify("another run id")

    def saw_primaries(self, primaries: frozenset[str]) -> None:
        """Compare the names of a cluster's primaries with those before."""
        before, self._primaries = self._primaries, primaries
        if before and primaries != before:
            self.run_id = " ".join(sorted(primaries))
            self._notify("another primary")

    def group_was_lost(self) -> None:
        """Report that a consumer had to create a group again on a server that had it before."""
        self._notify("a consumer group is gone")

    def _notify(self, cause: str) -> None:
        log.warning("redis was replaced or emptied", cause=cause, run_id=self.run_id)
        for callback in self._callbacks:
            try:
                callback()
            except Exception:
                log.exception("callback after a change of redis failed")


async def _ask_run_id(connection: AbstractConnection) -> str | None:
    link = cast("Any", connection)
    await link.send_command("INFO", "server")
    try:
        reply: bytes = await link.read_response()
    except ResponseError as error:  # a user without the right to ask: lost groups are still noticed
        log.debug("run id of redis is not known", error=str(error))
        return None
    for line in reply.splitlines():
        name, _, value = line.partition(b":")
        if name == b"run_id":
            return value.decode()
    return None
