"""Redis by TLS. The embedded redis-server has no TLS, so a proxy in front of it does."""

import datetime as dt
import ipaddress
import queue
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.conftest import EmbeddedRedis
from tests.integration.common.samples import STREAM, ids, message, take, take_queued
from tests.support.faults.tcp_proxy import proxy_to
from triptych_common.bus import AsyncBus, ThreadedBus
from triptych_common.domain.errors import BusRefusedError, BusUnavailableError
from triptych_common.protocol.codec import Envelope


class Authority:
    """Signs certificates; its own is `certificate` (PEM)."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = folder / f"{name}.pem"
        self.certificate.write_bytes(
            self._sign(self._name, self._key.public_key(), is_authority=True, hosts=())
        )

    def issue(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """(certificate, key), as PEM files."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate_file, key_file = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        certificate_file.write_bytes(self._sign(subject, key.public_key(), is_authority=False, hosts=hosts))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return certificate_file, key_file

    def _sign(
        self,
        subject: x509.Name,
        public_key: ec.EllipticCurvePublicKey,
        *,
        is_authority: bool,
        hosts: tuple[str, ...],
    ) -> bytes:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        )
        if is_authority:
            builder = builder.add_extension(
                x509.KeyUsage(
                    digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
                    key_encipherment=False, data_encipherment=False, key_agreement=False,
                    encipher_only=False, decipher_only=False,
                ),
                critical=True,
            )  # fmt: skip
        if hosts:
            names = [x509.IPAddress(ipaddress.ip_address(host)) for host in hosts]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


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
        context.load_verify_locations(authority.certificate)
    return context


@pytest.fixture
def tls_redis(own_redis: EmbeddedRedis, authority: Authority) -> Iterator[TlsRedis]:
    with proxy_to(own_redis.socket_path, tls=server_context(authority)) as proxy:
        yield TlsRedis(f"rediss://127.0.0.1:{proxy.port}/0", authority)


async def test_the_bus_uses_tls(tls_redis: TlsRedis) -> None:
    url = tls_redis.url(ssl_ca_certs=tls_redis.authority.certificate)
    async with (
        await AsyncBus.connect(url, "test", client_name="tests") as bus,
        bus.consumer(STREAM, group="g", consumer="c") as consumer,
    ):
        await bus.publish(STREAM, message(1))
        assert await take(consumer, 1) == ids(1)


def test_the_threaded_bus_uses_tls(tls_redis: TlsRedis) -> None:
    received: queue.Queue[Envelope] = queue.Queue()
    bus = ThreadedBus(
        tls_redis.url(ssl_ca_certs=tls_redis.authority.certificate), "test", client_name="tests"
    )
    try:
        bus.subscribe(STREAM, group="g", consumer="c", callback=received.put)
        bus.publish(STREAM, message(1))
        assert take_queued(received, 1) == ids(1)
    finally:
        bus.close()


async def test_a_certificate_of_another_authority_is_refused(tls_redis: TlsRedis, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    with pytest.raises(BusRefusedError, match=r"not trusted .*ssl_ca_certs in TRIPTYCH_REDIS_URL"):
        await AsyncBus.connect(tls_redis.url(ssl_ca_certs=other.certificate), "test", client_name="tests")


async def test_a_certificate_for_another_host_is_refused(
    own_redis: EmbeddedRedis, authority: Authority
) -> None:
    with proxy_to(own_redis.socket_path, tls=server_context(authority, host="192.0.2.1")) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={authority.certificate}"
        with pytest.raises(BusRefusedError, match="IP address mismatch"):
            await AsyncBus.connect(url, "test", client_name="tests")
        async with await AsyncBus.connect(
            f"{url}&ssl_check_hostname=false", "test", client_name="tests"
        ) as bus:
            await bus.stream_length("triptych:test:acks:e")


async def test_a_redis_that_asks_for_our_certificate(own_redis: EmbeddedRedis, authority: Authority) -> None:
    certificate, key = authority.issue("client")
    with proxy_to(own_redis.socket_path, tls=server_context(authority, asks_clients=True)) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={authority.certificate}"
        with pytest.raises(BusUnavailableError, match=r"Connection (closed by server|reset by peer)"):
            await AsyncBus.connect(url, "test", client_name="tests")
        own = f"{url}&ssl_certfile={certificate}&ssl_keyfile={key}"
        async with await AsyncBus.connect(own, "test", client_name="tests") as bus:
            await bus.stream_length("triptych:test:acks:e")


async def test_tls_to_a_redis_without_tls(own_redis: EmbeddedRedis, authority: Authority) -> None:
    with proxy_to(own_redis.socket_path) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={authority.certificate}"
        with pytest.raises(BusUnavailableError, match="Timeout connecting"):  # it waits for the line's end
            await AsyncBus.connect(url, "test", client_name="tests")
