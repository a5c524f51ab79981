"""A primary and its replica, and a sentinel that watches them: for tests of failover."""

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from tests.conftest import EmbeddedRedis, embedded_redis, redis_server_binary
from tests.support.waiting import free_port, wait_until

LIMIT_S = 60.0
FAST_REPLICATION = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")


@dataclass
class Pair:
    """A primary and its replica."""

    primary: EmbeddedRedis
    replica: EmbeddedRedis

    def fail_over(self) -> None:
        """Promote the replica, once it has everything; the old primary follows it."""
        with raw(self.primary) as old, raw(self.replica) as new:
            old.client_pause(10_000, all=False)  # no writes until it is a replica
            offset = old.info("replication")["master_repl_offset"]
            wait_until(
                lambda: new.info("replication")["slave_repl_offset"] >= offset, LIMIT_S, "replica has all"
            )
            new.execute_command("REPLICAOF", "NO", "ONE")
            old.execute_command("REPLICAOF", "127.0.0.1", self.replica.port)
            old.client_unpause()
        self.primary, self.replica = self.replica, self.primary


@contextlib.contextmanager
def raw(server: EmbeddedRedis) -> Iterator[Any]:
    with closing(redis.Redis.from_url(server.url)) as client:
        yield client


@contextlib.contextmanager
def running_pair() -> Iterator[Pair]:
    """Both run, and the replica follows."""
    with (
        embedded_redis(*FAST_REPLICATION, port=free_port()) as primary,
        embedded_redis(*FAST_REPLICATION, port=free_port()) as replica,
    ):
        with raw(replica) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", primary.port)
            wait_until(
                lambda: client.info("replication")["master_link_status"] == "up", LIMIT_S, "replica follows"
            )
        yield Pair(primary, replica)


@contextlib.contextmanager
def sentinel_of(primary: EmbeddedRedis, folder: Path) -> Iterator[int]:
    """One sentinel that may decide alone; its port."""
    port = free_port()
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor mymaster 127.0.0.1 {primary.port} 1\n"
        "sentinel down-after-milliseconds mymaster 300\nsentinel failover-timeout mymaster 1000\n"
    )
    log = folder / "sentinel.log"
    with log.open("wb") as output:
        process = subprocess.Popen([redis_server_binary(), str(config), "--sentinel"], stdout=output)
    client = redis.Redis(port=port)
    try:
        wait_until(lambda: _knows_a_replica(client), LIMIT_S, "sentinel knows the replica")
        yield port
    finally:
        client.close()
        process.kill()
        process.wait(10)


def _knows_a_replica(client: Any) -> bool:
    try:
        return bool(client.sentinel_slaves("mymaster"))
    except redis.ConnectionError:
        return False
