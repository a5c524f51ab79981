"""Next chunk: urgent entries first, equal shares within a class, none waits for ever; and the rate."""

from collections import Counter

import pytest

from triptych_common.domain.fair_queue import MAX_PASSED
from triptych_common.protocol.messages import EncodeClass
from triptych_fabric.transports.transport import BURST_S, NEVER_S, ChunkQueue, RateLimit
from triptych_fabric.wire.frames import MAX_CHUNK_BYTES

CHUNK = MAX_CHUNK_BYTES


class Entries:
    """A queue whose entries have more chunks than a test takes."""

    def __init__(self, rate: float | None = None) -> None:
        self.began: list[int] = []
        self.queue = ChunkQueue(RateLimit(rate), self.began.append)
        self.bytes = memoryview(bytes(40 * CHUNK))

    def add(self, number: int, encode_class: EncodeClass = EncodeClass.BATCH) -> None:
        self.queue.add(number, self.bytes, encode_class)

    def take(self, count: int, now: float = 0.0) -> list[int]:
        numbers = []
        for _ in range(count):
            found = self.queue.next_chunk(now)
            assert not isinstance(found, float)
            numbers.append(found[0].number)
        return numbers


def test_equal_shares_within_a_class() -> None:
    entries = Entries()
    for number in (1, 2, 3):
        entries.add(number)
    assert set(Counter(entries.take(30)).values()) == {10}
    assert sorted(entries.began) == [1, 2, 3]


def test_an_urgent_entry_passes_a_long_one() -> None:
    entries = Entries()
    entries.add(1, EncodeClass.AHEAD)
    entries.take(5)
    entries.add(2, EncodeClass.INTERACTIVE)
    assert entries.take(3) == [2, 2, 2]


def test_none_waits_for_ever() -> None:
    entries = Entries()
    entries.add(1, EncodeClass.AHEAD)
    entries.add(2, EncodeClass.INTERACTIVE)
    assert 1 in entries.take(MAX_PASSED + 1)


def test_a_later_class_counts_from_then_on() -> None:
    entries = Entries()
    entries.add(1)
    entries.add(2, EncodeClass.INTERACTIVE)
    entries.queue.change_class(1, EncodeClass.INTERACTIVE)
    assert Counter(entries.take(10)) == {1: 5, 2: 5}


def test_what_is_removed_is_not_sent() -> None:
    entries = Entries()
    entries.add(1)
    entries.queue.remove(1)
    entries.queue.remove(1)
    assert entries.queue.next_chunk(0.0) == NEVER_S


def test_the_rate_is_kept() -> None:
    rate, now, sent = RateLimit(10.0 * CHUNK), 100.0, 0
    while now < 110.0:
        if pause_s := rate.pause_s(now):
            now += pause_s
        else:
            rate.take(CHUNK, now)
            sent += 1
    assert sent == pytest.approx(10 * (10 + BURST_S), abs=2)
