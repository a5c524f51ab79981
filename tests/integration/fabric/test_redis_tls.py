"""Agents and a gateway that reach Redis by TLS alone."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import EmbeddedRedis
from tests.integration.fabric.conftest import MakeHost
from tests.support.fabric.orders import OrderingGateway, completed
from tests.support.faults.tcp_proxy import TcpProxy
from tests.support.gateway.certificates import Authority

HASH, OTHER = f"{1:064x}", f"{2:064x}"
DATA = random.Random(1).randbytes(3 << 20)


@pytest.fixture
def proxy(own_redis: EmbeddedRedis, run_dir: Path) -> Iterator[TcpProxy]:
    """It has a certificate for `localhost`."""
    authority = Authority(run_dir)
    with TcpProxy(own_redis.socket_path, tls=authority.server_context("localhost")) as running:
        yield running


@pytest.fixture
def redis_url(proxy: TcpProxy, run_dir: Path) -> str:
    return f"rediss://localhost:{proxy.port}/0?ssl_ca_certs={run_dir / 'ca.pem'}"


async def test_an_entry_gets_to_another_store(
    make_host: MakeHost, gateway: OrderingGateway, proxy: TcpProxy
) -> None:
    """And again after every connection to Redis has been cut."""
    source, target = make_host("a"), make_host("b")
    source.encode(HASH, DATA)
    source.encode(OTHER, DATA[::-1])
    completed(await gateway.transfer(source, target, HASH))
    assert await asyncio.to_thread(target.read, HASH) == DATA
    proxy.drop_connections()
    completed(await gateway.transfer(source, target, OTHER))
    assert await asyncio.to_thread(target.read, OTHER) == DATA[::-1]
    source.wait_no_leftovers()
    target.wait_no_leftovers()
