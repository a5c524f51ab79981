"""Callers: name, tenant, limits and rights of an API key. None of them is secret; the key is."""

from dataclasses import dataclass, field

from triptych_common.domain.hashing import owner_id, tenant_salt
from triptych_gateway.access.key_limits import KeyLimits


@dataclass(frozen=True, slots=True)
class Caller:
    """One API key without the key. Callers without a tenant share everything with each other."""

    key_name: str | None = None  # None: no authentication, or a key of the setting `api_keys`
    tenant: str | None = None
    key_digest: str | None = field(default=None, compare=False, repr=False)  # of a key that has no name
    limits: KeyLimits | None = field(default=None, compare=False, repr=False)
    is_operator: bool = field(default=False, compare=False)  # may see what all callers do, at `/ui`

    @property
    def owner(self) -> str:
        """Owner id of the caller's uploaded files: that of one API key, whatever its tenant.

        Without authentication all callers have the same.
        """
        return owner_id(tenant=self.tenant, key_name=self.key_name, key_digest=self.key_digest)

    @property
    def flow(self) -> str:
        """Flow of the caller's encode jobs: its tenant's, or else its key's; contains neither name."""
        if self.tenant is None:
            return self.owner
        return owner_id(tenant=self.tenant, key_name=None, key_digest=None)

    @property
    def salt(self) -> str:
        """Part of the identity of all that the caller's requests leave in a cache; "" means shared."""
        return "" if self.tenant is None else tenant_salt(self.tenant)

    def may_use(self, model: str) -> bool:
        return self.limits is None or self.limits.allows_model(model)

    def sees_as(self, other: "Caller") -> bool:
        """Return whether `/ui` shows both the same; `==` leaves out rights and limits."""
        mine, theirs = (self.owner, self.is_operator), (other.owner, other.is_operator)
        return mine == theirs and self.models == other.models

    @property
    def models(self) -> frozenset[str] | None:
        """Models that the caller may use; None for all."""
        return None if self.limits is None or self.limits.models is None else frozenset(self.limits.models)

    @property
    def fields(self) -> dict[str, str]:
        """Names of key and tenant, as fields for logs and spans."""
        fields = {"api_key_name": self.key_name, "tenant": self.tenant}
        return {name: value for name, value in fields.items() if value is not None}


ANONYMOUS = Caller(is_operator=True)  # without authentication nothing is anybody's own
