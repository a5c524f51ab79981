"""Redis by TLS. The embedded redis-server has no TLS, so a proxy in front of it does."""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import EmbeddedRedis
from tests.integration.common.samples import (
    STREAM,
    consuming_bus,
    ids,
    message,
    reading_bus,
    take,
    take_queued,
)
from tests.support.faults.tcp_proxy import proxy_to
from tests.support.gateway.certificates import Authority
from triptych_common.bus import AsyncBus
from triptych_common.domain.errors import BusRefusedError, BusUnavailableError


@dataclass
class TlsRedis:
    base_url: str  # without the certificates
    authority: Authority

    def url(self, **options: object) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"{self.base_url}?{query}"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


def server_context(
    authority: Authority, *, host: str = "127.0.0.1", asks_clients: bool = False
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server", host))
    if asks_clients:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(authority.ca_file)
    return context


@pytest.fixture
def tls_redis(own_redis: EmbeddedRedis, authority: Authority) -> Iterator[TlsRedis]:
    with proxy_to(own_redis.socket_path, tls=server_context(authority)) as proxy:
        yield TlsRedis(f"rediss://127.0.0.1:{proxy.port}/0", authority)


async def test_the_bus_uses_tls(tls_redis: TlsRedis) -> None:
    url = tls_redis.url(ssl_ca_certs=tls_redis.authority.ca_file)
    async with consuming_bus(url) as (bus, consumer):
        await bus.publish(STREAM, message(1))
        assert await take(consumer, 1) == ids(1)


def test_the_threaded_bus_uses_tls(tls_redis: TlsRedis) -> None:
    with reading_bus(tls_redis.url(ssl_ca_certs=tls_redis.authority.ca_file)) as (bus, received):
        bus.publish(STREAM, message(1))
        assert take_queued(received, 1) == ids(1)


async def test_a_certificate_of_another_authority_is_refused(tls_redis: TlsRedis, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    with pytest.raises(BusRefusedError, match=r"not trusted .*ssl_ca_certs in TRIPTYCH_REDIS_URL"):
        await AsyncBus.connect(tls_redis.url(ssl_ca_certs=other.ca_file), "test", client_name="tests")


async def test_a_certificate_for_another_host_is_refused(
    own_redis: EmbeddedRedis, authority: Authority
) -> None:
    with proxy_to(own_redis.socket_path, tls=server_context(authority, host="192.0.2.1")) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={authority.ca_file}"
        with pytest.raises(BusRefusedError, match="IP address mismatch"):
            await AsyncBus.connect(url, "test", client_name="tests")
        async with await AsyncBus.connect(
            f"{url}&ssl_check_hostname=false", "test", client_name="tests"
        ) as bus:
            await bus.stream_length("triptych:test:acks:e")


async def test_a_redis_that_asks_for_our_certificate(own_redis: EmbeddedRedis, authority: Authority) -> None:
    certificate, key = authority.issue("client")
    with proxy_to(own_redis.socket_path, tls=server_context(authority, asks_clients=True)) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={authority.ca_file}"
        with pytest.raises(BusUnavailableError, match=r"Connection (closed by server|reset by peer)"):
            await AsyncBus.connect(url, "test", client_name="tests")
        own = f"{url}&ssl_certfile={certificate}&ssl_keyfile={key}"
        async with await AsyncBus.connect(own, "test", client_name="tests") as bus:
            await bus.stream_length("triptych:test:acks:e")


async def test_tls_to_a_redis_without_tls(own_redis: EmbeddedRedis, authority: Authority) -> None:
    with proxy_to(own_redis.socket_path) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={authority.ca_file}"
        with pytest.raises(BusUnavailableError, match="Timeout connecting"):  # it waits for the line's end
            await AsyncBus.connect(url, "test", client_name="tests")
