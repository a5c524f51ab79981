"""Settings of the cache_store, from `TRIPTYCH_*` and the command line."""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator

from triptych_cache_store.entries.limits import Limits
from triptych_common.region.layout import RegionLayout
from triptych_common.runtime import MetricsSettings, ServiceSettings

MIB = 1 << 20
VerifyMode = Literal["off", "adopt", "always"]


class StoreSettings(ServiceSettings, MetricsSettings):
    """Settings of the cache_store daemon."""

    config_section = "cache_store"
    exports_spans = False

    instance: str = Field(default="store-0", description="name of this store; clients report it")
    region_dir: Path = Field(
        default_factory=lambda data: data["run_dir"],
        description="directory of the region file, on a tmpfs [default: RUN_DIR]",
    )
    region_bytes: PositiveInt = Field(default=1024 * MIB, description="size of the region file")
    block_bytes: PositiveInt = Field(default=64 << 10, description="unit of allocation; a multiple of 4096")
    slab_bytes: NonNegativeInt = Field(
        default=0, description="memory to take on a GPU, for the transport cuda_ipc"
    )
    slab_device: NonNegativeInt = Field(default=0, description="number of that GPU, of those to be seen")
    reserve_fraction: float = Field(
        default=0.05, ge=0, lt=1, description="of the region, kept for granted preallocations"
    )
    high_watermark: float = Field(
        default=0.98, gt=0, le=1, description="when more of the region is in use, evict in the background ..."
    )
    low_watermark: float = Field(default=0.95, ge=0, le=1, description="... until no more than this is")
    tenant_quota_bytes: PositiveInt | None = Field(
        default=None, description="bytes that a tenant may hold [default: all]"
    )
    tenant_quotas: dict[str, PositiveInt] = Field(
        default_factory=dict, description='bytes that the named tenants may hold, e.g. {"acme": 1073741824}'
    )
    large_pages: bool = Field(
        default=False, description="ask for large pages; a tmpfs mounted with huge=advise has them"
    )
    keep_region: bool = Field(
        default=False,
        description="leave the region file at a clean stop, for the next start [after a crash it always is]",
    )
    namespace_digest: str | None = Field(
        default=None, description="at start, drop entries of every other namespace [default: drop none]"
    )
    verify: VerifyMode = Field(
        default="off",
        description="adopt: take checksums in the background, check them after a restart; always: check "
        "them every VERIFY_INTERVAL_S too",
    )
    verify_interval_s: float = Field(default=600.0, gt=0, description="between two checks of all entries")
    max_unsent_bytes: PositiveInt = Field(
        default=8 * MIB, description="a client that leaves more replies unread is disconnected"
    )

    @field_validator("low_watermark")
    @classmethod
    def _watermarks_in_order(cls, value: float, info: ValidationInfo) -> float:
        if value > info.data.get("high_watermark", 1.0):
            raise ValueError("low_watermark is above high_watermark")
        return value

    def limits(self, layout: RegionLayout) -> Limits:
        """Limits in blocks of `layout`."""
        block = layout.block_num_bytes
        default_quota = self.tenant_quota_bytes
        return Limits(
            num_reserve_blocks=int(self.reserve_fraction * layout.num_blocks),
            high_watermark=int(self.high_watermark * layout.num_blocks),
            low_watermark=int(self.low_watermark * layout.num_blocks),
            tenant_quotas={tenant: quota // block for tenant, quota in self.tenant_quotas.items()},
            default_tenant_quota=None if default_quota is None else default_quota // block,
        )

    @property
    def region_path(self) -> Path:
        return self.region_dir / "region"
