"""Sizes of items, from `EncoderCacheMetadata`: in memory, over those in Redis (`SharedSizes`).

The rows and what else is in them follow from the mm_hash alone (it holds the namespace digest and every
option). Only how a video is divided may change: an encoder that starts again may find that it divides no
more, or now does. So the metadata that came last are right, and replace an entry that says otherwise.
"""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress

from cachetools import LRUCache
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from triptych_common.coordination import SharedSizes
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.item_record import ItemRecord
from triptych_common.protocol.messages import EncoderCacheMetadata
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.tracing.timings import ItemSource

log = get_logger(__name__)


class ItemSizes(BaseModel):
    """Sizes of one item, as kept in the bus' cache (JSON)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    num_embeds: PositiveInt  # rows of the encoder's output
    record: ItemRecord

    @classmethod
    def of(cls, metadata: EncoderCacheMetadata) -> "ItemSizes":
        return cls(num_embeds=metadata.num_embeds, record=metadata.record)


class SizesCache:
    """Cache in this process's memory, then on the bus. Without the bus, an item is ordered again."""

    def __init__(self, shared: SharedSizes, max_items: int) -> None:
        """Store the bound of items in this process's memory."""
        self._shared = shared
        self._local: LRUCache[MmHash, ItemSizes] = LRUCache(max_items)

    def __len__(self) -> int:
        return len(self._local)

    @property
    def max_items(self) -> int:
        """Largest number of items in this process's memory."""
        return int(self._local.maxsize)

    def get_local(self, mm_hash: MmHash) -> ItemSizes | None:
        return self._local.get(mm_hash)

    def put_local(self, mm_hash: MmHash, sizes: ItemSizes) -> bool:
        """Keep sizes; return True if they are new here and should be shared with other gateways."""
        is_changed = self._local.get(mm_hash) != sizes
        self._local[mm_hash] = sizes
        return is_changed

    async def fetch_shared(self, mm_hash: MmHash) -> ItemSizes | None:
        """Fetch sizes from the bus; None if unknown, unreadable, or the bus is away."""
        try:
            stored = await self._shared.get(mm_hash)
        except BusUnavailableError as error:
            log.warning("sizes cache not reachable", error=repr(error))
            return None
        if stored is None:
            return None
        try:
            sizes = ItemSizes.model_validate_json(stored)
        except ValidationError:
            log.warning("sizes cache entry not readable", mm_hash=mm_hash)
            return None
        self._local[mm_hash] = sizes
        return sizes

    async def find_all(
        self, mm_hashes: Sequence[MmHash], unknown: Collection[MmHash], timeout_s: float
    ) -> list[tuple[MmHash, ItemSizes, ItemSource]]:
        """Return known sizes with their source; the bus is asked for those in `unknown` alone."""
        local = {each: sizes for each in mm_hashes if (sizes := self.get_local(each)) is not None}
        missing = [each for each in mm_hashes if each in unknown and each not in local]
        found = [(each, sizes, ItemSource.MEMORY) for each, sizes in local.items()]
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                shared = zip(missing, await asyncio.gather(*map(self.fetch_shared, missing)), strict=True)
                found += [(each, sizes, ItemSource.REDIS) for each, sizes in shared if sizes is not None]
        return found

    async def store_shared(self, mm_hash: MmHash, sizes: ItemSizes) -> None:
        try:
            is_kept = await self._shared.set(mm_hash, sizes.model_dump_json().encode())
        except BusUnavailableError as error:
            log.warning("sizes cache not reachable", error=repr(error))
            return
        if not is_kept:
            log.warning("sizes of an item too large for the sizes cache", mm_hash=mm_hash)
