"""Certificates made for a test, by an authority of its own."""

import datetime as dt
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = dt.datetime.now(dt.UTC)
DAY = dt.timedelta(days=1)
_OF_AN_AUTHORITY = x509.KeyUsage(True, False, False, False, False, True, True, False, False)


class Authority:
    """Signs certificates; `ca_file` is what those who trust it need."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self.ca_file = folder / f"{name}.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"test authority {name}")])
        builder = self._builder(self._name, self._key, NOW + DAY, is_ca=True)
        self.ca_file.write_bytes(self._signed(builder.add_extension(_OF_AN_AUTHORITY, critical=True)))

    def issue(self, name: str, *hosts: str, until: dt.datetime = NOW + DAY) -> tuple[Path, Path]:
        """(certificate, key) for these hosts, as PEM files."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key, until, is_ca=False)
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        certificate_file, key_file = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        certificate_file.write_bytes(self._signed(builder))
        key_file.touch(mode=0o600)
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate_file, key_file

    def server_context(self, name: str, until: dt.datetime = NOW + DAY) -> ssl.SSLContext:
        """Return the context of a server with a certificate for `name`, valid `until` then."""
        certificate_file, key_file = self.issue(name, name, until=until)
        chain = self.folder / f"{name}.pem"
        chain.write_bytes(key_file.read_bytes() + certificate_file.read_bytes())
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(chain)
        return context

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, until: dt.datetime, *, is_ca: bool
    ) -> x509.CertificateBuilder:
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - 10 * DAY)
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(issuer, critical=False)
        )

    def _signed(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
