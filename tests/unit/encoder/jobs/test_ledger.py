"""The encoder's ledger: how long the producer's pin is kept."""

import pytest

from triptych_encoder.jobs.ledger import Ledger

K1, K2 = ("req-1", 0), ("req-2", 0)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_the_pin_ends_with_the_last_word_of_the_last_requester(ledger: Ledger) -> None:
    ledger.add("a", {K1, K2}, deadline=10)
    assert ledger.sealed("a", 7) == []
    assert ledger.settled("a", K1) == []
    assert ledger.settled("a", K1) == []
    assert ledger.settled("a", K2) == [7]
    assert ledger.settled("a", K2) == []
    assert len(ledger) == 0


def test_the_last_words_may_come_before_the_seal(ledger: Ledger) -> None:
    ledger.add("a", {K1}, deadline=10)
    assert ledger.settled("a", K1) == []
    assert ledger.sealed("a", 7) == [7]
    assert len(ledger) == 0


def test_an_item_that_nobody_waits_for_is_not_kept(ledger: Ledger) -> None:
    assert ledger.sealed("a", 7) == [7]
    ledger.add("b", set(), deadline=10)
    assert ledger.sealed("b", 8) == [8]


def test_one_pin_per_item_is_enough(ledger: Ledger) -> None:
    ledger.add("a", {K1}, deadline=10)
    ledger.sealed("a", 7)
    ledger.add("a", {K2}, deadline=20)
    assert ledger.sealed("a", 8) == [8]
    assert ledger.settled("a", K1) == []
    assert ledger.settled("a", K2) == [7]


def test_a_grant_counts_until_its_requester_is_done(ledger: Ledger) -> None:
    ledger.granted("a", K1)  # unknown: harmless
    assert not ledger.is_granted("a")
    ledger.add("a", {K1, K2}, deadline=10)
    ledger.granted("a", K1)
    assert ledger.is_granted("a")
    ledger.settled("a", K1)
    assert not ledger.is_granted("a")


def test_who_never_answers_is_not_waited_for_beyond_the_deadline(ledger: Ledger) -> None:
    assert ledger.next_deadline() is None
    ledger.add("a", {K1}, deadline=10)
    ledger.add("b", {K1}, deadline=20)
    ledger.add("c", {K1}, deadline=5)
    ledger.sealed("a", 7)
    ledger.sealed("b", 8)
    assert ledger.next_deadline() == 5
    assert ledger.expire(9.9) == []
    assert ledger.expire(10) == [7]
    assert ledger.next_deadline() == 20
    assert ledger.sealed("c", 9) == [9]  # it took longer to encode than anybody waited


def test_a_later_job_extends_the_deadline_and_an_earlier_one_does_not_shorten_it(ledger: Ledger) -> None:
    ledger.add("a", {K1}, deadline=10)
    ledger.add("a", {K2}, deadline=20)
    ledger.add("a", {K2}, deadline=15)
    assert ledger.next_deadline() == 20


def test_a_failed_job_is_forgotten(ledger: Ledger) -> None:
    ledger.add("a", {K1}, deadline=10)
    ledger.granted("a", K1)
    assert ledger.dropped("a", {K1}) == []
    assert len(ledger) == 0
    assert ledger.dropped("a", {K1}) == []


def test_a_failed_job_does_not_take_the_pin_of_an_earlier_one(ledger: Ledger) -> None:
    ledger.add("a", {K1}, deadline=10)
    ledger.sealed("a", 7)
    ledger.add("a", {K2}, deadline=20)
    assert ledger.dropped("a", {K2}) == []
    assert ledger.settled("a", K1) == [7]


def test_a_failed_job_whose_others_are_done_ends_the_pin(ledger: Ledger) -> None:
    ledger.add("a", {K1}, deadline=10)
    ledger.sealed("a", 7)
    ledger.add("a", {K2}, deadline=20)
    ledger.settled("a", K1)
    assert ledger.dropped("a", {K2}) == [7]


def test_what_is_not_sealed_and_nobody_waits_for_is_forgotten(ledger: Ledger) -> None:
    ledger.add("a", {K1}, deadline=10)
    ledger.granted("a", K1)
    assert ledger.settled("a", K1) == []
    assert (len(ledger), ledger.next_deadline()) == (0, None)
    ledger.add("a", {K2}, deadline=20)  # by a later job
    assert ledger.sealed("a", 7) == []
    assert ledger.settled("a", K2) == [7]
