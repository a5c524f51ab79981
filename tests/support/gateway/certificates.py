"""Certificates made for a test, by an authority of its own."""

import datetime as dt
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = dt.datetime.now(dt.UTC)
DAY = dt.timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """Signs certificates; `ca_file` is what those who trust it need."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls, folder: Path) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _builder("test authority", key, NOW + DAY).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        signed = certificate.add_extension(usage, critical=True).sign(key, hashes.SHA256())
        (folder / "ca.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return cls(folder, key, signed)

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.pem"

    def server_context(self, name: str, until: dt.datetime = NOW + DAY) -> ssl.SSLContext:
        """For a server with a certificate for `name`, valid `until` then."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(name, key, until, issuer=self.certificate.subject)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
            .sign(self.key, hashes.SHA256())
        )
        chain = self.folder / f"{name}.pem"
        chain.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(chain)
        return context


def _builder(
    name: str, key: ec.EllipticCurvePrivateKey, until: dt.datetime, issuer: x509.Name | None = None
) -> x509.CertificateBuilder:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - 10 * DAY)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
