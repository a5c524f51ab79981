"""A caller: the name of an API key and the tenant that it belongs to. Neither is a secret; the key is."""

from dataclasses import dataclass

from triptych_common.domain.hashing import tenant_salt


@dataclass(frozen=True, slots=True)
class Caller:
    """One API key without the key. Callers without a tenant share everything with each other."""

    key_name: str | None = None  # None: no authentication, or a key of the setting `api_keys`
    tenant: str | None = None

    @property
    def salt(self) -> str:
        """Part of the identity of all that the caller's requests leave in a cache; "": shared."""
        return "" if self.tenant is None else tenant_salt(self.tenant)

    @property
    def fields(self) -> dict[str, str]:
        """For logs and spans."""
        fields = {"api_key_name": self.key_name, "tenant": self.tenant}
        return {name: value for name, value in fields.items() if value is not None}


ANONYMOUS = Caller()
