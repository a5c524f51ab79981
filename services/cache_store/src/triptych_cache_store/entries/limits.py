"""Limits: how full the region may get, also by tenant. Pure numbers, no state."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limits:
    """In blocks. The defaults limit nothing."""

    num_reserve_blocks: int = 0
    """Kept for granted preallocations: others get no blocks beyond the free and evictable ones above it."""

    high_watermark: int | None = None
    """With more blocks than this in use, entries are evicted in the background ..."""

    low_watermark: int = 0
    """... until no more than this are."""

    tenant_quotas: Mapping[str, int] = field(default_factory=dict)
    """Of blocks per tenant, reservations and entries together."""

    default_tenant_quota: int | None = None
    """Of every tenant that has none of its own; None: no limit."""

    def quota_of(self, tenant: str) -> int | None:
        return self.tenant_quotas.get(tenant, self.default_tenant_quota)
