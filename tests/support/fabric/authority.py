"""A CA of a test, and certificates of agents that it signs."""

import datetime as dt
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """`path`: what those who trust it need."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign(name, self._key, is_ca=True)
        self.path = directory / f"{name}.ca.pem"
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def options(self, name: str, ca: Path | None = None) -> tuple[str, ...]:
        """An agent's, with a certificate of this authority; `ca`: whom it trusts."""
        return tuple(
            f"--{variable.removeprefix('TRIPTYCH_').lower().replace('_', '-')}={path}"
            for variable, path in self.environment(name, ca).items()
        )

    def environment(self, name: str, ca: Path | None = None) -> dict[str, str]:
        """The same, as variables."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate_path, key_path = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        certificate_path.write_bytes(self._sign(name, key).public_bytes(serialization.Encoding.PEM))
        key_path.touch(mode=0o600)
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return {
            "TRIPTYCH_FABRIC_TLS_CERT_FILE": str(certificate_path),
            "TRIPTYCH_FABRIC_TLS_KEY_FILE": str(key_path),
            "TRIPTYCH_FABRIC_TLS_CA_FILE": str(ca or self.path),
        }

    def _sign(self, name: str, key: ec.EllipticCurvePrivateKey, *, is_ca: bool = False) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
