"""The encoder's ledger: how long the producer's pin is kept."""

import itertools

import pytest

from triptych_common.domain.errors import IllegalTransitionError
from triptych_encoder.jobs.ledger import ALLOWED, Ledger, PinnedItem, PinState

K1, K2 = ("req-1", 0), ("req-2", 0)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_the_pin_ends_with_the_ack_of_the_last_requester(ledger: Ledger) -> None:
    ledger.add_requesters("a", {K1, K2}, deadline=10)
    assert ledger.hold_pins("a", [7]) == []
    assert ledger.remove_requesters("a", {K1}) == []
    assert ledger.remove_requesters("a", {K1}) == []
    assert ledger.remove_requesters("a", {K2}) == [7]
    assert ledger.remove_requesters("a", {K2}) == []
    assert len(ledger) == 0


def test_the_last_acks_may_come_before_the_seal(ledger: Ledger) -> None:
    ledger.add_requesters("a", {K1}, deadline=10)
    assert ledger.remove_requesters("a", {K1}) == []
    assert ledger.hold_pins("a", [7]) == [7]
    assert len(ledger) == 0


def test_an_item_without_requesters_is_not_kept(ledger: Ledger) -> None:
    assert ledger.hold_pins("a", [7]) == [7]
    ledger.add_requesters("b", set(), deadline=10)
    assert ledger.hold_pins("b", [8]) == [8]


def test_one_pin_per_item_is_enough(ledger: Ledger) -> None:
    ledger.add_requesters("a", {K1}, deadline=10)
    ledger.hold_pins("a", [7])
    ledger.add_requesters("a", {K2}, deadline=20)
    assert ledger.hold_pins("a", [8]) == [8]
    assert ledger.remove_requesters("a", {K1}) == []
    assert ledger.remove_requesters("a", {K2}) == [7]


def test_a_grant_counts_until_its_requester_is_done(ledger: Ledger) -> None:
    ledger.add_grant("a", K1)  # unknown: harmless
    assert not ledger.is_granted("a")
    ledger.add_requesters("a", {K1, K2}, deadline=10)
    ledger.add_grant("a", K1)
    assert ledger.is_granted("a")
    ledger.remove_requesters("a", {K1})
    assert not ledger.is_granted("a")


def test_a_requester_that_never_answers_is_not_waited_for_beyond_the_deadline(ledger: Ledger) -> None:
    assert ledger.next_deadline() is None
    ledger.add_requesters("a", {K1}, deadline=10)
    ledger.add_requesters("b", {K1}, deadline=20)
    ledger.add_requesters("c", {K1}, deadline=5)
    ledger.hold_pins("a", [7])
    ledger.hold_pins("b", [8])
    assert ledger.next_deadline() == 5
    assert ledger.expire(9.9) == []
    assert ledger.expire(10) == [7]
    assert ledger.next_deadline() == 20
    assert ledger.hold_pins("c", [9]) == [9]  # the encode took longer than any requester waited


def test_a_later_job_extends_the_deadline_and_an_earlier_one_does_not_shorten_it(ledger: Ledger) -> None:
    ledger.add_requesters("a", {K1}, deadline=10)
    ledger.add_requesters("a", {K2}, deadline=20)
    ledger.add_requesters("a", {K2}, deadline=15)
    assert ledger.next_deadline() == 20


def test_a_failed_job_is_forgotten(ledger: Ledger) -> None:
    ledger.add_requesters("a", {K1}, deadline=10)
    ledger.add_grant("a", K1)
    assert ledger.remove_requesters("a", {K1}) == []
    assert len(ledger) == 0
    assert ledger.remove_requesters("a", {K1}) == []


def test_a_failed_job_does_not_take_the_pin_of_an_earlier_one(ledger: Ledger) -> None:
    ledger.add_requesters("a", {K1}, deadline=10)
    ledger.hold_pins("a", [7])
    ledger.add_requesters("a", {K2}, deadline=20)
    assert ledger.remove_requesters("a", {K2}) == []
    assert ledger.remove_requesters("a", {K1}) == [7]


def test_a_failed_job_whose_others_are_done_ends_the_pin(ledger: Ledger) -> None:
    ledger.add_requesters("a", {K1}, deadline=10)
    ledger.hold_pins("a", [7])
    ledger.add_requesters("a", {K2}, deadline=20)
    ledger.remove_requesters("a", {K1})
    assert ledger.remove_requesters("a", {K2}) == [7]


def test_what_is_not_sealed_and_has_no_requesters_is_forgotten(ledger: Ledger) -> None:
    ledger.add_requesters("a", {K1}, deadline=10)
    ledger.add_grant("a", K1)
    assert ledger.remove_requesters("a", {K1}) == []
    assert (len(ledger), ledger.next_deadline()) == (0, None)
    ledger.add_requesters("a", {K2}, deadline=20)  # by a later job
    assert ledger.hold_pins("a", [7]) == []
    assert ledger.remove_requesters("a", {K2}) == [7]


WAYS = {
    PinState.ANNOUNCED: (),
    PinState.HELD: (PinState.HELD,),
    PinState.RELEASED: (PinState.HELD, PinState.RELEASED),
}


@pytest.mark.parametrize(("state", "to"), list(itertools.product(PinState, PinState)))
def test_only_what_the_table_allows_can_follow(state: PinState, to: PinState) -> None:
    item = PinnedItem("a", {K1}, 10)
    for each in WAYS[state]:
        item.enter(each)
    if to in ALLOWED[state]:
        item.enter(to)
        assert item.state is to
        return
    with pytest.raises(IllegalTransitionError, match="pin of a"):
        item.enter(to)
    assert item.state is state
