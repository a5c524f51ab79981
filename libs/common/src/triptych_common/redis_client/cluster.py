"""Client of Redis Cluster: commands and pipelines go to the server that holds their keys.

redis-py's client, with three changes. Its retries are off, since `run_command` repeats whole commands. Any
error or cancelled wait makes the next command read the slots anew: a server that hangs answers nothing, and
what took its place is known to the others only. And it asks no server for the keys of a command: here the
first argument is the key, but for scripts and reads of streams.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from redis import exceptions
from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterNode, ClusterPipeline
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from triptych_common.redis_client.commands import PASSING
from triptych_common.redis_client.server_watch import ServerWatch

SLOTS_TIMEOUT_S = 2.0  # to connect to a server, and to be told the slots


class ClusterClient(RedisCluster):
    """`redis.asyncio.Redis` as far as this package uses it, over all servers of a cluster."""

    def __init__(
        self,
        nodes: Sequence[tuple[str, int]],
        watch: ServerWatch,
        *,
        connection_class: type[AbstractConnection],
        **options: Any,
    ) -> None:
        """Store the addresses; the first command connects."""
        given = {"host", "port", "db", "retry", "driver_info", "socket_keepalive"} & options.keys()
        super().__init__(
            startup_nodes=[cast("Any", ClusterNode)(host, port) for host, port in nodes],
            retry=Retry(NoBackoff(), 0),
            reinitialize_steps=0,
            **{name: value for name, value in options.items() if name not in given and "ssl" not in name},
        )
        self._watch = watch
        links: dict[str, Any] = {name: value for name, value in options.items() if "ssl" in name}
        links |= {"driver_info": None, "redis_connect_func": watch.on_node_connect}
        self.connection_kwargs |= {**links, "connection_class": connection_class}
        for node in self.nodes_manager.startup_nodes.values():
            node.connection_class = cast("Any", connection_class)
            node.connection_kwargs.update(links)
        self.commands_parser = cast("Any", _KnowsCommands())

    async def initialize(self, *args: Any, **named: Any) -> "ClusterClient":
        """Read the slots if need be, and report another set of primaries to the watch."""
        if self._initialize:
            try:
                async with asyncio.timeout(SLOTS_TIMEOUT_S):
                    await super().initialize(*args, **named)
            except (exceptions.RedisClusterException, TimeoutError) as error:
                raise exceptions.ConnectionError(f"no server of the cluster: {error}") from error
            self._watch.saw_primaries(frozenset(each.name for each in self.get_primaries()))
        return self

    async def execute_command(self, *args: Any, **named: Any) -> Any:
        await self.initialize()  # else redis-py asks any server
        num_moved = self.reinitialize_counter
        try:
            reply = await super().execute_command(*args, **named)
        except (*PASSING, asyncio.CancelledError):
            self.read_slots_anew()
            raise
        if self.reinitialize_counter > num_moved:
            self.read_slots_anew()  # one slot moved, most likely with others
        return reply

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> "ClusterPipeline":
        """Return a pipeline whose commands may be of any slots; there are no transactions."""
        if transaction or shard_hint:
            raise NotImplementedError("transactions over a cluster")
        return cast("ClusterPipeline", cast("Any", _Pipeline)(self))

    def read_slots_anew(self) -> None:
        self._initialize = True

    async def aclose(self) -> None:
        """Close all connections, also those from before the slots were to be read anew."""
        self._initialize = False
        await super().aclose()

    async def _determine_slot(self, command: str, *args: Any) -> int:
        if command in ("EVAL", "EVALSHA"):
            key = args[2]
        elif command == "XREADGROUP":
            key = next(args[index + 1] for index, each in enumerate(args) if each in ("STREAMS", b"STREAMS"))
        else:
            key = args[0]
        return self.keyslot(key)

    # ---- as a pool of one server's connections, for `rights` -------------------------------
    @property
    def connection_pool(self) -> "ClusterClient":
        return self

    async def get_connection(self) -> AbstractConnection:
        await self.initialize()
        connection = self.get_default_node().acquire_connection()
        await cast("Any", connection).connect()
        return connection

    async def release(self, connection: AbstractConnection) -> None:
        for node in self.get_nodes():
            if connection in node._connections:  # noqa: SLF001 - redis-py's nodes tell of none
                node.release(cast("Any", connection))


class _Pipeline(ClusterPipeline):
    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        client = cast("ClusterClient", self.cluster_client)
        try:
            replies = await super().execute(False, allow_redirections)
        except (*PASSING, asyncio.CancelledError):
            client.read_slots_anew()
            raise
        errors = [each for each in replies if isinstance(each, Exception)]
        if any(isinstance(each, PASSING) for each in errors):
            client.read_slots_anew()
        if errors and raise_on_error:
            raise errors[0]
        return replies


class _KnowsCommands:
    """Parser that asks no server for commands and their keys, as redis-py's does."""

    async def initialize(self, node: object) -> None: ...
