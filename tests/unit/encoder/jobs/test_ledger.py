"""The encoder's ledger: how long the producer's pin is kept."""

import pytest

from triptych_encoder.jobs.ledger import Ledger

K1, K2 = ("req-1", 0), ("req-2", 0)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


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
