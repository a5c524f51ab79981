"""Checksums of tensors: 32 bits of BLAKE3, enough to notice an accident; taken beside the store's work."""

from collections.abc import Callable, Sequence

from blake3 import blake3

from triptych_cache_store.entries.entry_table import Entry
from triptych_common.region.layout import RegionLayout

STEP_BYTES = 4 << 20  # hashed at once, without the GIL


class Checksums:
    """Computes checksums of entries from `buffer`, which maps the whole region."""

    def __init__(self, buffer: memoryview, layout: RegionLayout) -> None:
        self._buffer = buffer
        self._layout = layout

    def has_checksum(self, entry: Entry, checksum: int) -> bool:
        """True if the bytes of `entry` have this checksum."""
        return self.compute([entry]) == [checksum]

    def compute(
        self, entries: Sequence[Entry], is_stopping: Callable[[], bool] = lambda: False
    ) -> list[int] | None:
        """Checksums of the entries in order; None if `is_stopping` became true.

        Callable from any thread. Bytes may change meanwhile: a checksum counts only if its entry is still
        sealed.
        """
        checksums: list[int] = []
        for entry in entries:
            digest = blake3()
            start = self._layout.offset_of(entry.blocks.start)
            end = start + entry.spec.num_bytes
            for offset in range(start, end, STEP_BYTES):
                if is_stopping():
                    return None
                with self._buffer[offset : min(offset + STEP_BYTES, end)] as part:
                    digest.update(part)
            checksums.append(int.from_bytes(digest.digest(4), "little"))
        return checksums
