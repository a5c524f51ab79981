"""A Redis Cluster of three primaries with a replica each, on this machine."""

import contextlib
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import redis

from tests.conftest import EmbeddedRedis, embedded_redis
from tests.support.faults.redis_pair import FAST_REPLICATION, LIMIT_S, raw
from tests.support.waiting import wait_until

NUM_PRIMARIES, NUM_SLOTS = 3, 16384
NODE_TIMEOUT_MS = 1000  # until the others take a server for dead
PORTS = range(22_000, 22_768)
"""Ports of the servers, each of which has one 10,000 higher, too. The kernel gives none of them to
connections, and no `FastSystem` listens there: a killed server gets its ports again.
"""
BUS_PORT_OFFSET = 10_000


@dataclass(frozen=True)
class Tls:
    """Files of servers that speak nothing but TLS, also with each other; clients need no certificate."""

    command: tuple[str, ...]  # of a redis-server with TLS, which the embedded one has not
    authority: Path
    certificate: Path
    key: Path

    def options(self, port: int) -> tuple[str, ...]:
        return (
            "--port", "0", "--tls-port", str(port), "--tls-cluster", "yes", "--tls-replication", "yes",
            "--tls-auth-clients", "no", "--tls-ca-cert-file", str(self.authority),
            "--tls-cert-file", str(self.certificate), "--tls-key-file", str(self.key),
        )  # fmt: skip


class Cluster:
    """Six servers. As a server of `FastSystem`, it is stopped and frozen one primary at a time."""

    def __init__(self, nodes: list[EmbeddedRedis], tls: Tls | None) -> None:
        self.nodes = nodes
        self._scheme, self._query = "redis", ""
        if tls is not None:
            self._scheme, self._query = "rediss", f"?ssl_ca_certs={tls.authority}"
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in nodes)
        self.url = f"{self._scheme}+cluster://{hosts}{self._query}"
        self._victim = nodes[0]
        self._turns = cycle(("{instance}", "{sizes}", "{c}"))  # of three primaries

    def primary_of(self, key: str) -> EmbeddedRedis:
        """Return the primary that holds `key`'s slot, as most servers see it."""
        client: Any = redis.RedisCluster.from_url(
            f"{self._scheme}://127.0.0.1:{self._alive().port}{self._query}"
        )
        try:
            port = client.get_node_from_key(key).port
        finally:
            client.close()
        return next(each for each in self.nodes if each.port == port)

    def stop(self) -> None:
        """Kill a primary, each in its turn; returns when its replica has taken its place."""
        self.wait_until_whole()
        key = next(self._turns)
        self._victim = self.primary_of(key)
        self._victim.stop()
        wait_until(lambda: self.primary_of(key) is not self._victim, LIMIT_S, "replica is primary")

    def start(self) -> None:
        """Start it again, as a replica; it gets its data from the new primary."""
        self._victim.start()

    def freeze(self) -> None:
        self._victim = self.primary_of(next(self._turns))
        self._victim.freeze()

    def thaw(self) -> None:
        self._victim.thaw()

    def wait_until_whole(self) -> None:
        """Wait until every slot has a primary that a replica follows, as each server sees it."""
        wait_until(lambda: all(map(_is_whole, self.nodes)), LIMIT_S, "cluster is whole")

    def _alive(self) -> EmbeddedRedis:
        return next(each for each in self.nodes if _answers(each))


@contextlib.contextmanager
def running_cluster(tls: Tls | None = None) -> Iterator[Cluster]:
    """All run, and each replica follows its primary."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(_node(tls)) for _ in range(2 * NUM_PRIMARIES)]
        primaries, replicas = nodes[:NUM_PRIMARIES], nodes[NUM_PRIMARIES:]
        bounds = [NUM_SLOTS * at // NUM_PRIMARIES for at in range(NUM_PRIMARIES + 1)]
        for number, node in enumerate(primaries):
            with raw(node) as client:
                client.execute_command("CLUSTER ADDSLOTS", *range(bounds[number], bounds[number + 1]))
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for node in nodes[1:]:
            with raw(node) as client:
                client.execute_command("CLUSTER MEET", "127.0.0.1", nodes[0].port)
        for primary, replica in zip(primaries, replicas, strict=True):
            with raw(primary) as client:
                name = client.execute_command("CLUSTER MYID").decode()
            with raw(replica) as client:
                wait_until(partial(_tries_to_follow, client, name), LIMIT_S, "replica knows its primary")
        cluster = Cluster(nodes, tls)
        cluster.wait_until_whole()
        yield cluster


def _node(tls: Tls | None) -> contextlib.AbstractContextManager[EmbeddedRedis]:
    port = next(port for port in random.sample(PORTS, len(PORTS)) if _is_free(port))
    return embedded_redis(
        *FAST_REPLICATION, "--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS),
        "--cluster-replica-validity-factor", "0", *(tls.options(port) if tls else ()),
        port=port, command=tls.command if tls else (),
    )  # fmt: skip


def _is_free(port: int) -> bool:
    with ExitStack() as stack, contextlib.suppress(OSError):
        for each in (port, port + BUS_PORT_OFFSET):
            stack.enter_context(socket.socket()).bind(("127.0.0.1", each))
        return True
    return False


def _tries_to_follow(client: Any, primary: str) -> bool:
    try:
        client.execute_command("CLUSTER REPLICATE", primary)
    except redis.ResponseError:  # not met yet
        return False
    return True


def _answers(node: EmbeddedRedis) -> bool:
    client = redis.Redis.from_url(node.url, socket_timeout=1.0)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


def _is_whole(node: EmbeddedRedis) -> bool:
    client: Any = redis.Redis.from_url(node.url, socket_timeout=1.0)
    try:
        info = client.execute_command("CLUSTER INFO")
        state = info if isinstance(info, dict) else {}
        role = client.info("replication")
    except redis.RedisError:
        return False
    finally:
        client.close()
    follows = role["role"] == "master" and role["connected_slaves"] == 1
    return state.get("cluster_state") == "ok" and (follows or role.get("master_link_status") == "up")
