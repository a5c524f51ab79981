"""Tenants: how many blocks each holds, and its own order of eviction. Pure."""

from collections import OrderedDict
from dataclasses import dataclass, field

from triptych_cache_store.entries.entry_table import Entry


@dataclass(slots=True)
class _Tenant:
    num_blocks: int = 0
    num_evictable_blocks: int = 0
    evictable: "OrderedDict[int, Entry]" = field(default_factory=OrderedDict)  # oldest use first


class TenantTable:
    """Blocks of reservations and entries, by tenant ("" for those without)."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def num_blocks(self, tenant: str) -> int:
        found = self._tenants.get(tenant)
        return 0 if found is None else found.num_blocks

    def num_evictable_blocks(self, tenant: str) -> int:
        found = self._tenants.get(tenant)
        return 0 if found is None else found.num_evictable_blocks

    def oldest_evictable(self, tenant: str) -> Entry:
        """The tenant has one."""
        return next(iter(self._tenants[tenant].evictable.values()))

    def add_blocks(self, entry: Entry) -> None:
        self._tenants.setdefault(entry.tenant, _Tenant()).num_blocks += entry.blocks.num_blocks

    def remove_blocks(self, entry: Entry) -> None:
        tenant = self._tenants[entry.tenant]
        tenant.num_blocks -= entry.blocks.num_blocks
        if tenant.num_blocks == 0:
            del self._tenants[entry.tenant]

    def became_evictable(self, entry: Entry) -> None:
        tenant = self._tenants[entry.tenant]
        tenant.evictable[entry.reservation_id] = entry
        tenant.num_evictable_blocks += entry.blocks.num_blocks

    def no_longer_evictable(self, entry: Entry) -> None:
        tenant = self._tenants[entry.tenant]
        del tenant.evictable[entry.reservation_id]
        tenant.num_evictable_blocks -= entry.blocks.num_blocks
