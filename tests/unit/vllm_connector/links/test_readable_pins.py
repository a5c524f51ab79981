"""A pin counts only if its bytes can be read from here; else the entry is made anew, once."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import mm_hash, pinned, sealed, watching
from triptych_common.domain.errors import BusUnavailableError, StoreError
from triptych_common.protocol.store import Descriptor, StoreReply
from triptych_vllm_connector.links.readable_pins import ReadablePins

A = mm_hash("a")
WAIT_S = 5.0


class FakeLink:
    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def pin_or_watch(self, mm_hash: str) -> None:
        self.asked.append(("pin_or_watch", mm_hash))

    def unpin(self, pin_id: int) -> None:
        self.asked.append(("unpin", pin_id))

    def unwatch(self, mm_hash: str) -> None:
        self.asked.append(("unwatch", mm_hash))

    def evict_entry(self, mm_hash: str) -> None:
        self.asked.append(("evict", mm_hash))

    def close(self) -> None:
        self.asked.append(("close",))


class Bench:
    """The link to the store below, the consumer above."""

    def __init__(self) -> None:
        self.link = FakeLink()
        self.delivered: list[Any] = []
        self.can_read: Callable[[Descriptor], bool] = lambda descriptor: True
        self.pins = ReadablePins(
            self.link,
            lambda descriptor: self.can_read(descriptor),  # noqa: PLW0108 - tests change it
            lambda mm_hash, reply: self.delivered.append(reply),
            self.delivered.append,
        )


def descriptor_in(memory: str) -> Descriptor:
    return pinned(A, 1).descriptor.model_copy(update={"memory": memory})


def in_memory(message: Any, memory: str) -> Any:
    return message.model_copy(update={"descriptor": descriptor_in(memory)})


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(500):
        if condition():
            return
        pause.wait(0.01)
    pytest.fail("it did not come")


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.pins.close()


def test_what_is_in_the_region_passes_at_once(bench: Bench) -> None:
    bench.can_read = lambda descriptor: pytest.fail("nothing is to be checked")
    answers: list[StoreReply] = [pinned(A, 1), watching(A), sealed(A, 2)]
    bench.pins.on_store_reply(A, answers[0])
    bench.pins.on_store_reply(A, answers[1])
    bench.pins.on_store_push(answers[2])
    assert bench.delivered == answers


def test_what_can_be_read_passes(bench: Bench) -> None:
    reply, push = in_memory(pinned(A, 1), "redis"), in_memory(sealed(A, 2), "redis")
    bench.pins.on_store_reply(A, reply)
    bench.pins.on_store_push(push)
    wait_for(lambda: bench.delivered == [reply, push])
    assert bench.link.asked == []


def test_what_cannot_be_read_is_made_anew_once(bench: Bench) -> None:
    bench.can_read = lambda descriptor: False
    bench.pins.pin_or_watch(A)
    bench.pins.on_store_reply(A, in_memory(pinned(A, 1), "redis"))
    again = [("pin_or_watch", A), ("unpin", 1), ("evict", A), ("pin_or_watch", A)]
    wait_for(lambda: bench.link.asked == again)
    assert bench.delivered == []
    bench.pins.on_store_push(in_memory(sealed(A, 2), "redis"))
    wait_for(lambda: bool(bench.delivered))
    assert isinstance(bench.delivered[0], StoreError)
    assert bench.link.asked == [*again, ("unpin", 2)]


def test_when_it_cannot_be_checked_the_item_fails(bench: Bench) -> None:
    def away(descriptor: Descriptor) -> bool:
        raise BusUnavailableError("Redis is away")

    bench.can_read = away
    bench.pins.on_store_reply(A, in_memory(pinned(A, 1), "redis"))
    wait_for(lambda: bool(bench.delivered))
    assert isinstance(bench.delivered[0], StoreError)
    assert bench.link.asked == [("unpin", 1)]


def test_what_was_given_up_meanwhile_is_not_watched(bench: Bench) -> None:
    asked_again = threading.Event()

    def slow(descriptor: Descriptor) -> bool:
        asked_again.wait(WAIT_S)
        return False

    bench.can_read = slow
    bench.pins.pin_or_watch(A)
    bench.pins.on_store_reply(A, in_memory(pinned(A, 1), "redis"))
    bench.pins.unwatch(A)
    asked_again.set()
    wait_for(lambda: ("unpin", 1) in bench.link.asked)
    bench.pins.close()
    assert bench.link.asked == [
        ("pin_or_watch", A), ("unwatch", A), ("unpin", 1), ("evict", A), ("close",)
    ]  # fmt: skip
    assert bench.delivered == []


def test_a_fault_in_one_check_ends_no_other(bench: Bench) -> None:
    def fail(descriptor: Descriptor) -> bool:
        raise ValueError("not thought of")

    bench.can_read = fail
    bench.pins.on_store_reply(A, in_memory(pinned(A, 1), "redis"))
    wait_for(lambda: bool(bench.delivered))
    assert isinstance(bench.delivered[0], StoreError)
    assert bench.link.asked == [("unpin", 1)]
    bench.can_read = lambda descriptor: True
    reply = in_memory(pinned(A, 2), "redis")
    bench.pins.on_store_reply(A, reply)
    wait_for(lambda: bench.delivered[1:] == [reply])


def test_a_refusal_is_forgotten_with_the_request(bench: Bench) -> None:
    bench.can_read = lambda descriptor: False
    for pin_id in (1, 2):  # the second finds no refusal of the first
        bench.link.asked.clear()
        bench.pins.pin_or_watch(A)
        bench.pins.on_store_reply(A, in_memory(pinned(A, pin_id), "redis"))
        again = [("pin_or_watch", A), ("unpin", pin_id), ("evict", A), ("pin_or_watch", A)]
        wait_for(lambda again=again: bench.link.asked == again)
        bench.pins.unwatch(A)
    assert bench.delivered == []
