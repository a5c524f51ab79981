"""Authentication of agents: a shared key, mutual TLS, or both; without either an agent does not start.

With a key, each side proves possession by an HMAC over both stores' names, both sides' fresh random numbers,
the transport, and the certificate of the receiver's agent (with TLS), so a proof is useless on another
connection. With TLS (1.3 only), both sides show a certificate signed by the configured CA;
names in it do not matter, so the CA must be the fabric's own.
"""

import hashlib
import hmac
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from triptych_common.domain.errors import TriptychError
from triptych_common.runtime.secret_files import SecretFileError, read_key, read_secret

NONCE_BYTES = 32


class FabricKeyError(TriptychError):
    """The key or the certificates are unusable; a setting must change."""


def transcript(*facts: str, binding: bytes) -> bytes:
    """Facts that both sides of one connection share and no other connection has, each behind its length.

    `binding` is the digest of the certificate of the receiver's agent; empty without TLS.
    """
    parts = (*(fact.encode() for fact in facts), binding)
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


@dataclass(frozen=True)
class Credentials:
    """Key and certificates of this agent, and what it requires of peers."""

    key: bytes | None = None
    server_tls: ssl.SSLContext | None = None
    client_tls: ssl.SSLContext | None = None
    own_certificate: bytes = b""  # DER

    def proof(self, side: str, facts: bytes) -> str:
        """Proof of `side` ("source" or "target") over a `transcript`, in hex; empty without a key."""
        if self.key is None:
            return ""
        message = b"triptych fabric\0" + side.encode() + b"\0" + facts
        return hmac.new(self.key, message, hashlib.sha256).hexdigest()

    def is_proof(self, proof: str, side: str, facts: bytes) -> bool:
        return hmac.compare_digest(proof, self.proof(side, facts))


def new_nonce() -> str:
    return os.urandom(NONCE_BYTES).hex()


def load_credentials(
    key_file: Path | None, certificate: Path | None, private_key: Path | None, ca: Path | None
) -> Credentials:
    """Load key and certificates from files.

    Raises:
        FabricKeyError: there are none, or they cannot be read, are open to others, or do not belong together.
    """
    try:
        key = None if key_file is None else read_key(key_file)
    except SecretFileError as error:
        raise FabricKeyError(f"the fabric's keys: {error}") from None
    if (certificate, private_key, ca) == (None, None, None):
        if key is None:
            raise FabricKeyError("the fabric needs FABRIC_KEY_FILE, or certificates (FABRIC_TLS_*)")
        return Credentials(key)
    if certificate is None or private_key is None or ca is None:
        raise FabricKeyError("FABRIC_TLS_CERT_FILE, _KEY_FILE and _CA_FILE are set together, or none of them")
    try:
        read_secret(private_key, max_bytes=0)  # its mode, which OpenSSL does not look at
        server, client = (
            _context(protocol, certificate, private_key, ca)
            for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
        )
        own = ssl.PEM_cert_to_DER_cert(_first_certificate(certificate.read_text()))
    except SecretFileError as error:
        raise FabricKeyError(f"the fabric's keys: {error}") from None
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise FabricKeyError(f"the fabric's certificates cannot be used: {error}") from error
    return Credentials(key, server, client, own)


def _context(protocol: int, certificate: Path, private_key: Path, ca: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # whoever the CA signed belongs to the fabric
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, private_key)
    context.load_verify_locations(ca)
    return context


def _first_certificate(text: str) -> str:
    start, end = text.index("-----BEGIN CERTIFICATE-----"), "-----END CERTIFICATE-----"
    return text[start : text.index(end, start) + len(end)]
