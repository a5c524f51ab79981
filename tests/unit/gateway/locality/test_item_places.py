"""At which store encoders make items: the latest metadata count, and each change is told once."""

import asyncio

import pytest

from tests.support.message_samples import cache_metadata
from triptych_common.domain.hashing import entry_hashes
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncoderCacheMetadata, Modality
from triptych_gateway.locality import item_places
from triptych_gateway.locality.item_places import ItemPlaces

A = MmHash("a" * 64)


def metadata(
    store: str = "store-a",
    mm_hash: str = A,
    *,
    sealed: bool = False,
    pieces: tuple[int, ...] = (),
    job_id: str = "job-1",
) -> EncoderCacheMetadata:
    return cache_metadata(
        job_id=job_id,
        mm_hash=mm_hash,
        modality=Modality.VIDEO,
        num_embeds=6,
        store=store,
        sealed=sealed,
        pieces=pieces,
    )


@pytest.fixture
def places() -> ItemPlaces:
    return ItemPlaces(lambda: True)


def test_metadata_then_the_seal(places: ItemPlaces) -> None:
    places.note_metadata(metadata(pieces=(2, 4)))
    (place,) = places.take_changed()
    assert (place.store, place.is_sealed) == ("store-a", False)
    assert (place.entries, place.entry_bytes()) == (entry_hashes(A, (2, 4)), (32, 64))
    places.note_sealed(A, "job-1")
    assert [each.is_sealed for each in places.take_changed()] == [True]
    places.note_sealed(A, "job-1")
    assert places.take_changed() == [], "known"


def test_late_metadata_of_the_same_store_do_not_undo_the_seal(places: ItemPlaces) -> None:
    places.note_metadata(metadata(sealed=True))
    places.note_metadata(metadata(sealed=False))
    found = places.find(A)
    assert found is not None
    assert found.is_sealed
    places.note_metadata(metadata("store-b"))
    found = places.find(A)
    assert found is not None
    assert (found.store, found.is_sealed) == ("store-b", False)


def test_a_new_encode_at_the_same_store_is_not_sealed(places: ItemPlaces) -> None:
    places.note_metadata(metadata(sealed=True))
    places.note_metadata(metadata(job_id="job-2"))
    found = places.find(A)
    assert found is not None
    assert not found.is_sealed
    places.note_sealed(A, "job-1")
    assert places.find(A) == found, "the late word of the first job"
    places.note_sealed(A, "job-2")
    found = places.find(A)
    assert found is not None
    assert found.is_sealed


def test_a_store_that_lacks_it_is_forgotten_and_no_other(places: ItemPlaces) -> None:
    places.note_metadata(metadata("store-b"))
    places.forget(A, "store-a")
    assert places.find(A) is not None
    places.forget(A, "store-b")
    places.forget(A, "store-b")
    assert places.find(A) is None
    assert places.take_changed() == [], "of what is not known any more nothing is told"
    places.note_sealed(A, "job-1")
    assert places.find(A) is None


async def test_who_waits_is_woken_once_for_all(places: ItemPlaces) -> None:
    places.note_metadata(metadata())
    places.note_metadata(metadata(mm_hash="b" * 64))
    await places.wait_changed()
    assert len(places.take_changed()) == 2
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await places.wait_changed()


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_places, "MAX_KNOWN", 100)
    places = ItemPlaces(lambda: True)
    for number in range(101):
        places.note_metadata(metadata(mm_hash=f"{number:064x}"))
    assert places.find(MmHash("0" * 64)) is None
    assert len(places.take_changed()) == 100


def test_a_copy_of_what_is_known_tells_nothing_new(places: ItemPlaces) -> None:
    """Its encoder may have died since: who takes the job over says so itself."""
    places.note_metadata(metadata(), is_copy=True)
    assert len(places.take_changed()) == 1
    places.note_metadata(metadata(), is_copy=True)
    assert places.take_changed() == []
    places.note_metadata(metadata())
    assert len(places.take_changed()) == 1
