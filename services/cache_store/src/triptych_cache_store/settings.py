"""Settings of the cache_store, from `TRIPTYCH_*` and the command line."""

from pathlib import Path

from pydantic import Field, PositiveInt

from triptych_common.runtime import ServiceSettings

MIB = 1 << 20


class StoreSettings(ServiceSettings):
    """What the daemon needs to know."""

    instance: str = Field(default="store-0", description="name of this store; clients report it")
    region_dir: Path = Field(
        default_factory=lambda data: data["run_dir"],
        description="directory of the region file, on a tmpfs [default: RUN_DIR]",
    )
    region_bytes: PositiveInt = Field(default=1024 * MIB, description="size of the region file")
    block_bytes: PositiveInt = Field(default=64 << 10, description="unit of allocation; a multiple of 4096")
    max_unsent_bytes: PositiveInt = Field(
        default=8 * MIB, description="a client that leaves more replies unread is disconnected"
    )

    @property
    def region_path(self) -> Path:
        return self.region_dir / "region"
