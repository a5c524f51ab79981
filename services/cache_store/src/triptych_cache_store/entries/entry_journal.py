"""Journal of entries that keeps nothing; `persistence.journal` keeps one in the region's headers."""

from triptych_cache_store.entries.entry_table import Entry


class EntryJournal:
    """Empty journal, for memory that ends with the store and cannot be recovered."""

    def note_reserved(self, entry: Entry, writer_slot: int) -> None:
        pass

    def note_sealed(self, entry: Entry) -> None:
        pass

    def note_used(self, entry: Entry) -> None:
        pass

    def note_abandoned(self, entry: Entry) -> None:
        pass

    def note_freed(self, entry: Entry) -> None:
        pass
