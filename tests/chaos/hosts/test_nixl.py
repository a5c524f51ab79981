"""NIXL between hosts of their own: it carries entries there, and where it does not work TCP follows it."""

import asyncio
import contextlib
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fabric.agent_process import write_fabric_key
from tests.support.fabric.fabric_host import HAS_NIXL, UCX_BETWEEN_HOSTS, FabricHost, transports_option
from tests.support.fabric.orders import OrderingGateway, completed, ordering_gateway
from tests.support.hosts.control_redis import ControlRedis, control_redis
from tests.support.hosts.namespaces import require_namespaces
from tests.support.hosts.network import Network
from triptych_common.protocol.messages import FabricTransport

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.long,  # agents with NIXL take seconds to start
    pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed"),
]

MIB = 1 << 20
PORT = 7420
LIMIT_S = 30.0
SHARED_MEMORY = "/dev/shm"
SLOW = f"--fabric-max-rate={3 * MIB}"
DATA = random.Random(1).randbytes(12 * MIB)
HASH, OTHER = f"{1:064x}", f"{2:064x}"
MakeHost = Callable[..., FabricHost]


@pytest.fixture
def network() -> Iterator[Network]:
    require_namespaces()
    with Network(["a", "b", "control"]) as made:
        yield made


@pytest.fixture
def redis(network: Network) -> Iterator[ControlRedis]:
    with control_redis(network["control"]) as server:
        yield server


@pytest.fixture(autouse=True)
def _network_of_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in UCX_BETWEEN_HOSTS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """In memory, as regions are."""
    with tempfile.TemporaryDirectory(prefix="triptych-test-", dir=SHARED_MEMORY) as path:
        yield Path(path)


@pytest.fixture
def make_host(network: Network, redis: ControlRedis, run_dir: Path) -> Iterator[MakeHost]:
    key_file = write_fabric_key(run_dir / "key")
    with contextlib.ExitStack() as stack:

        def make(name: str, *options: str) -> FabricHost:
            host = FabricHost(
                run_dir / name,
                redis.service_url,
                name,
                PORT,
                f"--fabric-key-file={key_file}",
                f"--fabric-listen-host={network[name].address}",
                "--fabric-progress-timeout-s=2",
                transports_option("nixl", "tcp"),
                *options,
            )
            stack.callback(host.close)
            network[name].call(host.start)
            return host

        yield make


@pytest.fixture
async def gateway(redis: ControlRedis) -> AsyncIterator[OrderingGateway]:
    async with ordering_gateway(redis.url) as ordering:
        yield ordering


async def test_between_hosts(make_host: MakeHost, gateway: OrderingGateway) -> None:
    source, target = make_host("a"), make_host("b")
    source.encode(HASH, DATA)
    assert completed(await gateway.transfer(source, target, HASH)).transport is FabricTransport.NIXL
    assert await asyncio.to_thread(target.read, HASH) == DATA
    source.wait_no_leftovers()
    target.wait_no_leftovers()


@pytest.mark.parametrize("broken", ["a", "b"])
async def test_nixl_that_cannot_use_its_network(
    make_host: MakeHost, gateway: OrderingGateway, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """It loads all the same; no link comes about by it, and entries go by TCP."""
    hosts = {}
    for name in ("a", "b"):
        monkeypatch.setenv("UCX_NET_DEVICES", "nothing0" if name == broken else "eth0")
        hosts[name] = make_host(name)
    source, target = hosts["a"], hosts["b"]
    for mm_hash in (HASH, OTHER):
        source.encode(mm_hash, DATA)
        assert completed(await gateway.transfer(source, target, mm_hash)).transport is FabricTransport.TCP
        assert await asyncio.to_thread(target.read, mm_hash) == DATA
    assert source.agent.log().count("fabric transport failed") == 1
    source.wait_no_leftovers()
    target.wait_no_leftovers()


@pytest.mark.skipif(shutil.which("iptables") is None, reason="no iptables")
async def test_nixl_that_gets_stuck_in_the_middle(
    make_host: MakeHost, gateway: OrderingGateway, network: Network
) -> None:
    """UCX's connections are cut, the agents' is not: the same order comes true by TCP."""
    source, target = make_host("a", SLOW), make_host("b")
    source.encode(HASH, DATA)
    result = await gateway.order(source, target, HASH)
    await target.wait_being_written(HASH, LIMIT_S)
    near, far = str(network["a"].address), network["b"].namespace
    of_agents = ("!", "--dport", str(PORT), "-j", "DROP")
    far.run("iptables", "-A", "INPUT", "-s", near, "-p", "tcp", *of_agents)
    assert completed(await asyncio.wait_for(result, LIMIT_S)).transport is FabricTransport.TCP
    assert "NIXL moved nothing" in source.agent.log()
    assert (await asyncio.to_thread(target.pushes.wait_next, LIMIT_S)).kind == "writer_lost"
    assert await asyncio.to_thread(target.wait_sealed, HASH) == DATA
    source.wait_no_leftovers()
    target.wait_no_leftovers()
