"""Limits on how full the region may get, also by tenant. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in blocks; the defaults limit nothing."""

    num_reserve_blocks: int = 0
    """Blocks that only granted preallocations may use, counting free and evictable blocks."""

    high_watermark: int | None = None
    """Blocks in use above which entries are evicted in the background; None never evicts."""

    low_watermark: int = 0
    """Blocks in use at which background eviction stops."""

    tenant_quotas: Mapping[str, int] = field(default_factory=dict)
    """Blocks each tenant may hold, reservations and entries together."""

    default_tenant_quota: int | None = None
    """Quota of tenants without one of their own; None is unlimited."""

    def quota_of(self, tenant: str) -> int | None:
        return self.tenant_quotas.get(tenant, self.default_tenant_quota)
