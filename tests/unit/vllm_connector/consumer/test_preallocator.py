"""The preallocator: whole requests, first come first served, the oversized ones item by item."""

import pytest

from triptych_vllm_connector.consumer.preallocator import (
    AsyncPreallocator,
    Need,
    Preallocator,
    SyncPreallocator,
    make_preallocator,
)


def needs(*items: str) -> list[Need]:
    """`a4` is item a, 4 rows; the index is its place."""
    return [Need(item[0], int(item[1:]), index) for index, item in enumerate(items)]


def granted_of(preallocator: Preallocator) -> list[tuple[str, list[str]]]:
    return [
        (request_id, [need.mm_hash for need in granted])
        for request_id, granted in preallocator.take_granted()
    ]


def test_a_request_that_fits_is_granted_whole_at_once() -> None:
    preallocator = SyncPreallocator(10)
    wanted = needs("a4", "b6")
    assert preallocator.can_preallocate(wanted)
    assert preallocator.preallocate("r1", wanted) == wanted
    assert preallocator.num_embeds_used == 10
    assert not preallocator.is_pending("r1")


def test_an_item_that_is_held_already_costs_nothing() -> None:
    preallocator = SyncPreallocator(10)
    preallocator.preallocate("r1", needs("a8"))
    assert preallocator.can_preallocate(needs("a8", "b2"))
    assert not preallocator.can_preallocate(needs("a8", "b3"))
    assert len(preallocator.preallocate("r2", needs("a8", "b2"))) == 2
    preallocator.deallocate("r1", "a")
    assert preallocator.num_embeds_used == 10  # r2 holds it still
    preallocator.deallocate("r2", "a")
    assert preallocator.num_embeds_used == 2


def test_larger_than_the_budget_is_served_item_by_item() -> None:
    preallocator = SyncPreallocator(10)
    assert [need.mm_hash for need in preallocator.preallocate("r1", needs("a6", "b4", "c6", "d6"))] == [
        "a",
        "b",
    ]
    assert preallocator.is_pending("r1")
    assert granted_of(preallocator) == []
    preallocator.deallocate("r1", "a")
    assert granted_of(preallocator) == [("r1", ["c"])]
    preallocator.deallocate("r1", "b")
    assert granted_of(preallocator) == []
    preallocator.deallocate("r1", "c")
    assert granted_of(preallocator) == [("r1", ["d"])]
    assert not preallocator.is_pending("r1")


def test_an_oversized_request_of_which_much_is_held_by_others_may_fit_as_a_whole() -> None:
    preallocator = SyncPreallocator(10)
    preallocator.preallocate("r1", needs("a4"))
    preallocator.preallocate("r2", needs("b4"))
    assert len(preallocator.preallocate("r3", needs("a4", "b4", "c2"))) == 3


def test_the_first_in_the_queue_asks_anew_for_less_and_gets_it() -> None:
    preallocator = SyncPreallocator(10)
    preallocator.preallocate("r0", needs("z5"))
    preallocator.preallocate("r1", needs("a6"))
    preallocator.preallocate("r2", needs("b1"))
    assert [need.mm_hash for need in preallocator.preallocate("r1", needs("c3"))] == ["c"]
    assert granted_of(preallocator) == [("r2", ["b"])]


def test_what_is_larger_than_the_budget_can_never_be_held() -> None:
    assert SyncPreallocator(10).can_ever_hold(Need("a", 10))
    assert not SyncPreallocator(10).can_ever_hold(Need("a", 11))
    assert AsyncPreallocator().can_ever_hold(Need("a", 1 << 40))


def test_ending_twice_and_strangers_are_harmless() -> None:
    preallocator = SyncPreallocator(10)
    preallocator.preallocate("r1", needs("a4"))
    preallocator.finalize_allocation("a")
    preallocator.finalize_allocation("unknown")
    preallocator.deallocate("r2", "a")
    assert preallocator.num_embeds_used == 4
    preallocator.deallocate("r1", "a")
    preallocator.deallocate("r1", "a")
    preallocator.depreallocate("r1")
    assert preallocator.num_embeds_used == 0


def test_async_grants_everything_at_once_and_still_keeps_books() -> None:
    preallocator = AsyncPreallocator()
    for index in range(5):
        wanted = [Need(f"h{index}", 1 << 30)]
        assert preallocator.preallocate(f"r{index}", wanted) == wanted
    assert preallocator.num_pending == 0
    for index in range(5):
        preallocator.depreallocate(f"r{index}")
    assert preallocator.num_embeds_used == 0


def test_strategies_by_name() -> None:
    assert not make_preallocator("sync", 1).can_ever_hold(Need("a", 2))
    assert make_preallocator("async", 1).can_ever_hold(Need("a", 2))
    with pytest.raises(ValueError, match="'eager'"):
        make_preallocator("eager", 1)
