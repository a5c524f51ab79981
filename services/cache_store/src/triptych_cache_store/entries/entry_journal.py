"""Interface of the journal of entries; `persistence.journal` implements it in the region's headers."""

from triptych_cache_store.entries.entry_table import Entry


class EntryJournal:
    """Keeps nothing: for memory that ends with the store, so that nothing of it can be taken up again."""

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
