"""Redis Cluster of three primaries: all that services do, with the listed rights, and a primary's death."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import embedded_redis
from tests.integration.common.redis_client.test_rights import (
    PASSWORD,
    add_user,
    use_everything,
)
from tests.integration.common.samples import ids, message, take
from tests.support.debian_packages import unpacked
from tests.support.faults.redis_cluster import Cluster, Tls, running_cluster
from tests.support.faults.redis_pair import raw
from tests.support.gateway.certificates import Authority
from tests.support.waiting import free_port, until
from triptych_common.bus import AsyncBus
from triptych_common.domain.errors import BusRefusedError, BusUnavailableError
from triptych_common.redis_client.rights import rules


@pytest.fixture(scope="module", params=["plain", "tls"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    tls = _tls(tmp_path_factory.mktemp("tls")) if request.param == "tls" else None
    with running_cluster(tls) as running:
        yield running


def _tls(folder: Path) -> Tls:
    """Debian's redis-server has TLS."""
    try:
        package = unpacked("redis-server", with_needed=True)
    except FileNotFoundError as error:
        pytest.skip(f"no redis-server with TLS: {error}")
    authority = Authority(folder, "authority")
    libraries = ":".join(map(str, {each.parent for each in package.rglob("*.so.*")}))
    binary = package / "usr" / "bin" / "redis-server"
    command = ("env", f"LD_LIBRARY_PATH={libraries}", str(binary))
    return Tls(command, authority.ca_file, *authority.issue("server", "127.0.0.1"))


async def test_a_user_with_the_listed_rights_does_everything(cluster: Cluster) -> None:
    for node in cluster.nodes:
        with raw(node) as client:
            add_user(client, *rules("test"))
    url = cluster.url.replace("://", f"://triptych:{PASSWORD}@")
    async with await AsyncBus.connect(url, "test", client_name="tests") as bus:
        assert await bus.check() == ()
        await use_everything(bus, url)
    for node in cluster.nodes:
        with raw(node) as client:
            assert client.execute_command("ACL", "LOG") == []


async def test_a_missing_right_is_named(cluster: Cluster) -> None:
    for node in cluster.nodes:
        with raw(node) as client:
            add_user(client, *(rule for rule in rules("test") if rule != "+xadd"))
    url = cluster.url.replace("://", f"://triptych:{PASSWORD}@")
    with pytest.raises(BusRefusedError, match=r"lacks a right: \+xadd$"):
        await AsyncBus.connect(url, "test", client_name="tests")


async def test_a_server_without_a_cluster_is_refused() -> None:
    with (
        embedded_redis(port=free_port()) as server,
        pytest.raises(BusUnavailableError, match="Cluster mode is not enabled on this node"),
    ):
        await AsyncBus.connect(f"redis+cluster://127.0.0.1:{server.port}", "test", client_name="tests")


async def test_a_consumer_goes_on_when_its_primary_dies(cluster: Cluster) -> None:
    async with await AsyncBus.connect(cluster.url, "test", client_name="tests") as bus:
        stream, changes = bus.names.acks("f"), list[bool]()
        bus.on_server_changed(lambda: changes.append(True))
        async with bus.consumer(stream, group="owner", consumer="f") as consumer:
            await bus.publish(stream, message(1))
            assert await take(consumer, 1) == ids(1)
            victim = cluster.primary_of(stream)
            await asyncio.to_thread(victim.stop)
            while True:
                try:
                    await bus.publish(stream, message(2))
                    break
                except BusUnavailableError:
                    assert cluster.primary_of(stream) is not None
            taken: list[str] = []
            while taken[-1:] != ids(2):  # the first may come again: the last writes may be lost
                taken += await take(consumer, 1)
            await until(lambda: changes)
    await asyncio.to_thread(victim.start)
    await asyncio.to_thread(cluster.wait_until_whole)
