"""Settings of the cache_store, from `TRIPTYCH_*` and the command line."""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator

from triptych_cache_store.entries.space import Limits
from triptych_common.region.layout import RegionLayout
from triptych_common.runtime import MetricsSettings, ServiceSettings

MIB = 1 << 20
VerifyMode = Literal["off", "adopt", "always"]


class StoreSettings(ServiceSettings, MetricsSettings):
    """Settings of the cache_store daemon."""

    config_section = "cache_store"
    exports_spans = False

    instance: str = "store-0"
    """Name of this store, reported by its clients; `{hostname}` in it is replaced by the host's name."""
    region_dir: Path = Field(default_factory=lambda data: data["run_dir"])
    """Folder of the region file, on a tmpfs. Not set: `run_dir`."""
    region_bytes: PositiveInt = 1024 * MIB
    """Bytes of the region of shared memory, headers included; `up` and `demo` set 256 MiB, or half of what
    the tmpfs has left."""
    block_bytes: PositiveInt = 64 << 10
    """Bytes of a block, the unit of allocation; a multiple of 4096."""
    slab_bytes: NonNegativeInt = 0
    """Bytes of GPU memory to take for the transport `cuda_ipc`, rounded up to 2 MiB, held until the process
    ends; 0: none. Without a GPU or `cuda-bindings` the store runs without and logs it."""
    slab_device: NonNegativeInt = 0
    """Number of the slab's GPU, among those that the store may see."""
    reserve_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share of the region that only granted preallocations may use."""
    high_watermark: float = Field(default=0.98, gt=0, le=1)
    """Used share of the region above which entries are evicted in the background."""
    low_watermark: float = Field(default=0.95, ge=0, le=1)
    """Used share of the region at which background eviction stops."""
    tenant_quota_bytes: PositiveInt | None = None
    """Bytes that one tenant may hold; no service names tenants yet. Not set: no bound."""
    tenant_quotas: dict[str, PositiveInt] = Field(default_factory=dict)
    """JSON object of the bytes that named tenants may hold, such as `{"acme": 1073741824}`."""
    large_pages: bool = False
    """Ask for large pages (`MADV_HUGEPAGE`): a tmpfs has them if mounted with `huge=advise` or `huge=always`,
    `/dev/shm` if `shmem_enabled` allows it; the outcome is logged."""
    keep_region: bool = False
    """Leave the region file at a clean stop, for the next start; after a crash it is always left. `up` and
    Compose set it."""
    namespace_digest: str | None = None
    """Digest of the namespace whose entries are kept at the start; others are dropped. Not set: all are kept.
    """
    verify: VerifyMode = "off"
    """Checksums of sealed tensors: `adopt` takes them in the background and checks them when a restarted
    store adopts the region; `always` also checks every `verify_interval_s` and evicts damaged ones."""
    verify_interval_s: float = Field(default=600.0, gt=0)
    """Seconds between two checks of all entries, with `verify` `always`."""
    max_unsent_bytes: PositiveInt = 8 * MIB
    """Bytes of replies that a client may leave unread; with more it is disconnected."""

    @field_validator("low_watermark")
    @classmethod
    def _watermarks_in_order(cls, value: float, info: ValidationInfo) -> float:
        if value > info.data.get("high_watermark", 1.0):
            raise ValueError("low_watermark is above high_watermark")
        return value

    def limits(self, layout: RegionLayout) -> Limits:
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
