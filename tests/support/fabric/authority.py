"""A CA of a test, and certificates of agents that it signs."""

from pathlib import Path

from tests.support.gateway import certificates


class Authority(certificates.Authority):
    """Its certificates as an agent's options."""

    def options(self, name: str, ca: Path | None = None) -> tuple[str, ...]:
        """An agent's, with a certificate of this authority; `ca`: whom it trusts."""
        return tuple(
            f"--{variable.removeprefix('TRIPTYCH_').lower().replace('_', '-')}={path}"
            for variable, path in self.environment(name, ca).items()
        )

    def environment(self, name: str, ca: Path | None = None) -> dict[str, str]:
        """The same, as variables."""
        certificate_file, key_file = self.issue(name)
        return {
            "TRIPTYCH_FABRIC_TLS_CERT_FILE": str(certificate_file),
            "TRIPTYCH_FABRIC_TLS_KEY_FILE": str(key_file),
            "TRIPTYCH_FABRIC_TLS_CA_FILE": str(ca or self.ca_file),
        }
