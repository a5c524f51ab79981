"""The journal in the region records every step that the journal of entries knows."""

from triptych_cache_store.entries.space import EntryJournal
from triptych_cache_store.persistence.journal import RegionJournal


def test_no_step_is_left_to_the_journal_that_keeps_nothing() -> None:
    steps = {name for name in vars(EntryJournal) if name.startswith("note_")}
    assert steps
    assert steps <= vars(RegionJournal).keys()
