"""Whose chunk is next: urgent ones first, equal shares within a class, none waits for ever; and the rate."""

from collections import Counter

import pytest

from triptych_cache_store.fabric.source.byte_turns import BURST_S, ByteTurns, RateLimit
from triptych_common.domain.fair_turns import MAX_PASSED
from triptych_common.protocol.messages import EncodeClass

CHUNK = 1 << 20


def take(turns: ByteTurns, count: int) -> list[int]:
    numbers = []
    for _ in range(count):
        number = turns.next_number()
        assert number is not None
        turns.take_turn(number, CHUNK)
        numbers.append(number)
    return numbers


def test_nothing_waits() -> None:
    assert ByteTurns().next_number() is None


def test_equal_shares_within_a_class() -> None:
    turns = ByteTurns()
    for number in (1, 2, 3):
        turns.add(number, EncodeClass.BATCH)
    assert set(Counter(take(turns, 30)).values()) == {10}


def test_an_urgent_entry_passes_a_long_one() -> None:
    turns = ByteTurns()
    turns.add(1, EncodeClass.AHEAD)
    take(turns, 5)
    turns.add(2, EncodeClass.INTERACTIVE)
    assert take(turns, 3) == [2, 2, 2]


def test_none_waits_for_ever() -> None:
    turns = ByteTurns()
    turns.add(1, EncodeClass.AHEAD)
    turns.add(2, EncodeClass.INTERACTIVE)
    assert 1 in take(turns, MAX_PASSED + 1)


def test_a_later_class_counts_from_then_on() -> None:
    turns = ByteTurns()
    turns.add(1, EncodeClass.BATCH)
    turns.add(2, EncodeClass.INTERACTIVE)
    turns.add(1, EncodeClass.INTERACTIVE)
    assert Counter(take(turns, 10)) == {1: 5, 2: 5}


def test_what_is_removed_has_no_turn() -> None:
    turns = ByteTurns()
    turns.add(1, EncodeClass.BATCH)
    turns.remove(1)
    turns.remove(1)
    assert turns.next_number() is None


def test_without_a_limit_nothing_waits() -> None:
    rate = RateLimit(None)
    rate.take(1 << 40, 0.0)
    assert rate.pause_s(0.0) == 0.0


def test_the_rate_is_kept() -> None:
    rate, now, sent = RateLimit(10.0 * CHUNK), 100.0, 0
    while now < 110.0:
        if pause_s := rate.pause_s(now):
            now += pause_s
        else:
            rate.take(CHUNK, now)
            sent += 1
    assert sent == pytest.approx(10 * (10 + BURST_S), abs=2)
