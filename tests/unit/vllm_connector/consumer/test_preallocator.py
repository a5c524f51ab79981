"""The preallocator: whole requests, first come first served, the oversized ones item by item."""

import pytest

from triptych_common.domain.errors import IllegalTransitionError
from triptych_vllm_connector.consumer.preallocator import (
    ALLOWED,
    AsyncPreallocator,
    ItemSpace,
    Need,
    Preallocator,
    SpaceState,
    SyncPreallocator,
    make_preallocator,
    move_space,
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


def test_the_same_item_twice_in_a_request_is_counted_once() -> None:
    preallocator = SyncPreallocator(5)
    assert len(preallocator.preallocate("r1", needs("a5", "a5"))) == 2
    assert preallocator.num_embeds_used == 5


def test_whole_requests_wait_and_hold_nothing_meanwhile() -> None:
    preallocator = SyncPreallocator(10)
    preallocator.preallocate("r1", needs("a6"))
    assert preallocator.preallocate("r2", needs("b3", "c3")) == []
    assert preallocator.is_pending("r2")
    assert preallocator.num_embeds_used == 6
    assert granted_of(preallocator) == []
    preallocator.deallocate("r1", "a")
    assert granted_of(preallocator) == [("r2", ["b", "c"])]
    assert preallocator.num_pending == 0


def test_no_request_overtakes_a_large_one() -> None:
    preallocator = SyncPreallocator(10)
    preallocator.preallocate("r1", needs("a6"))
    preallocator.preallocate("large", needs("b10"))
    assert preallocator.preallocate("small", needs("c1")) == []
    assert granted_of(preallocator) == []
    preallocator.deallocate("r1", "a")
    assert granted_of(preallocator) == [("large", ["b"])]
    preallocator.depreallocate("large")
    assert granted_of(preallocator) == [("small", ["c"])]


def test_several_are_granted_when_they_fit_together() -> None:
    preallocator = SyncPreallocator(10)
    preallocator.preallocate("r0", needs("z10"))
    for index in range(1, 5):
        preallocator.preallocate(f"r{index}", needs(f"{'abcd'[index - 1]}4"))
    preallocator.depreallocate("r0")
    assert [request_id for request_id, _ in preallocator.take_granted()] == ["r1", "r2"]
    assert preallocator.num_pending == 2


def test_a_request_that_leaves_the_queue_makes_way() -> None:
    preallocator = SyncPreallocator(10)
    preallocator.preallocate("r1", needs("a6"))
    preallocator.preallocate("large", needs("b10"))
    preallocator.preallocate("small", needs("c4"))
    preallocator.depreallocate("large")
    assert granted_of(preallocator) == [("small", ["c"])]


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


def test_item_by_item_begins_only_when_no_other_request_holds_space() -> None:
    preallocator = SyncPreallocator(10)
    preallocator.preallocate("r1", needs("a2"))
    assert preallocator.preallocate("large", needs("b6", "c6")) == []
    preallocator.deallocate("r1", "a")
    assert granted_of(preallocator) == [("large", ["b"])]


def test_an_oversized_request_with_an_image_again_at_its_end_gets_through() -> None:
    preallocator = SyncPreallocator(10)
    wanted = needs("a6", "b6", "a6")
    assert preallocator.preallocate("r1", wanted) == wanted[:1]
    preallocator.deallocate("r1", "a")
    assert preallocator.take_granted() == [("r1", wanted[1:2])]
    preallocator.deallocate("r1", "b")
    assert preallocator.take_granted() == [("r1", wanted[2:])]


def test_an_oversized_request_of_which_much_is_held_by_others_may_fit_as_a_whole() -> None:
    preallocator = SyncPreallocator(10)
    preallocator.preallocate("r1", needs("a4"))
    preallocator.preallocate("r2", needs("b4"))
    assert len(preallocator.preallocate("r3", needs("a4", "b4", "c2"))) == 3


def test_asking_anew_keeps_the_place_in_the_queue() -> None:
    preallocator = SyncPreallocator(10)
    preallocator.preallocate("r0", needs("z10"))
    preallocator.preallocate("r1", needs("a6"))
    preallocator.preallocate("r2", needs("b6"))
    assert preallocator.preallocate("r1", needs("c6")) == []
    preallocator.depreallocate("r0")
    assert granted_of(preallocator) == [("r1", ["c"])]


def test_the_first_in_the_queue_asks_anew_for_less_and_gets_it() -> None:
    preallocator = SyncPreallocator(10)
    preallocator.preallocate("r0", needs("z5"))
    preallocator.preallocate("r1", needs("a6"))
    preallocator.preallocate("r2", needs("b1"))
    assert [need.mm_hash for need in preallocator.preallocate("r1", needs("c3"))] == ["c"]
    assert granted_of(preallocator) == [("r2", ["b"])]


def test_a_request_that_waits_no_more_leaves_the_queue_and_keeps_what_it_holds() -> None:
    preallocator = SyncPreallocator(10)
    preallocator.preallocate("r0", needs("z5"))
    preallocator.preallocate("r1", needs("a6"))
    preallocator.preallocate("r2", needs("b6"))
    preallocator.cancel_pending("r2")
    preallocator.cancel_pending("r1")
    preallocator.cancel_pending("r0")
    assert (preallocator.num_pending, preallocator.num_embeds_used) == (0, 5)


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


@pytest.mark.parametrize("state", SpaceState)
@pytest.mark.parametrize("to", SpaceState)
def test_only_the_drawn_steps_can_be_taken(state: SpaceState, to: SpaceState) -> None:
    space = ItemSpace("a", 4, state=state)
    if to in ALLOWED[state]:
        move_space(space, to)
        assert space.state is to
    else:
        with pytest.raises(IllegalTransitionError):
            move_space(space, to)
        assert space.state is state


def test_strategies_by_name() -> None:
    assert not make_preallocator("sync", 1).can_ever_hold(Need("a", 2))
    assert make_preallocator("async", 1).can_ever_hold(Need("a", 2))
    with pytest.raises(ValueError, match="'eager'"):
        make_preallocator("eager", 1)
