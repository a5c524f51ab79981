"""Hosts with a store and an agent each, a gateway that orders, a real Redis."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fabric.agent_process import write_fabric_key
from tests.support.fabric.fabric_host import HAS_NIXL, FabricHost, transports_option
from tests.support.fabric.orders import OrderingGateway, ordering_gateway
from tests.support.waiting import free_port

MakeHost = Callable[..., FabricHost]
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed")
ALL_TRANSPORTS = ["tcp", pytest.param("nixl", marks=needs_nixl)]
by_each_transport = pytest.mark.parametrize("transport", ALL_TRANSPORTS, indirect=True)
by_each_transport_in_time = pytest.mark.parametrize(  # agents with NIXL take seconds to start
    "transport", ["tcp", pytest.param("nixl", marks=[needs_nixl, pytest.mark.long])], indirect=True
)


@pytest.fixture
def key_file(run_dir: Path) -> Path:
    return write_fabric_key(run_dir / "key")


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    """Of all hosts; tcp unless `by_each_transport`."""
    return getattr(request, "param", "tcp")


@pytest.fixture
def make_host(run_dir: Path, redis_url: str, key_file: Path, transport: str) -> Iterator[MakeHost]:
    """Started hosts, by name; `options` are the agent's."""
    hosts: list[FabricHost] = []

    def make(
        name: str,
        *options: str,
        region_bytes: int = 64 << 20,
        key: bool = True,
        store_options: tuple[str, ...] = (),
    ) -> FabricHost:
        if key:
            options = (f"--fabric-key-file={key_file}", *options)
        if not any(each.startswith("--fabric-transports") for each in options):  # a list: they would add up
            options = (*options, transports_option(transport))
        host = FabricHost(
            run_dir / name,
            redis_url,
            name,
            free_port(),
            "--fabric-progress-timeout-s=2",
            *options,
            region_bytes=region_bytes,
            store_options=store_options,
        )
        hosts.append(host)
        host.start()
        return host

    yield make
    for host in hosts:
        host.close()


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[OrderingGateway]:
    async with ordering_gateway(redis_url) as ordering:
        yield ordering
