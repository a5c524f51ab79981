"""RowEstimates: rows and bytes of an item's tensor, estimated from recent items. Pure."""

from cachetools import LRUCache

from triptych_common.domain.fair_turns import turn_cost
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncoderCacheMetadata, ImageProperties, Modality

FIRST_ROWS = 1280.0  # of an item of cost 1, which is a megapixel: 28 x 28 pixels to a row
FIRST_ROW_BYTES = 8192.0  # 4096 columns of two bytes
WEIGHT = 0.2  # of the latest observation
MAX_ASKED = 8192  # items that were asked about, and whose sizes are to come


class RowEstimates:
    """Estimates of one gateway over all namespaces: small errors change few choices."""

    def __init__(self) -> None:
        self._rows: dict[Modality, float] = {}  # of an item of cost 1
        self._row_bytes = FIRST_ROW_BYTES
        self._asked: LRUCache[MmHash, float] = LRUCache(MAX_ASKED)  # cost
        self.mean_rows = FIRST_ROWS  # of an item

    def rows_of(self, mm_hash: MmHash, modality: Modality, image: ImageProperties | None) -> float:
        """Return the estimated rows of an item without known sizes."""
        cost = self._asked[mm_hash] = turn_cost(modality, image)
        return cost * self._rows.get(modality, FIRST_ROWS)

    def bytes_of(self, num_rows: float) -> int:
        return int(num_rows * self._row_bytes)

    def observe(self, metadata: EncoderCacheMetadata) -> None:
        """Learn rows and bytes from an item's metadata."""
        num_rows = float(metadata.num_embeds)
        self._row_bytes = _mean(self._row_bytes, metadata.num_bytes / num_rows)
        self.mean_rows = _mean(self.mean_rows, num_rows)
        if (cost := self._asked.pop(MmHash(metadata.mm_hash), None)) is not None:
            before = self._rows.get(metadata.modality, num_rows / cost)
            self._rows[metadata.modality] = _mean(before, num_rows / cost)


def _mean(before: float, latest: float) -> float:
    return before + WEIGHT * (latest - before)
