"""What vLLM's own scheduler is told: items are pinned when they are needed, and every pin ends once."""

from types import SimpleNamespace
from typing import Any

import pytest

from triptych_common.protocol.store import Descriptor, TensorSpec
from triptych_vllm_connector.plain.store_pins import StorePin
from triptych_vllm_connector.plain.wanted_items import ASK_AGAIN_S, WantedItems

ROWS, WIDTH = 4, 8
TIMEOUT_S = 2.0


class FakePins:
    """A store with `present` items. Answers None for all while `is_away`."""

    def __init__(self, *present: str) -> None:
        self.present = set(present)
        self.is_away = False
        self.generation = 1
        self.asked: list[str] = []
        self.held: set[int] = set()
        self._next = 1

    def try_pin(self, mm_hash: str) -> StorePin | None:
        self.asked.append(mm_hash)
        if self.is_away or mm_hash not in self.present:
            return None
        pin_id, self._next = self._next, self._next + 1
        self.held.add(pin_id)
        spec = TensorSpec(shape=(ROWS, WIDTH), dtype="float32", num_bytes=ROWS * WIDTH * 4)
        descriptor = Descriptor(mm_hash="0" * 64, spec=spec, offset=0, generation=self.generation)
        return StorePin(pin_id, descriptor, "region")

    def is_current(self, pin: StorePin) -> bool:
        return pin.descriptor.generation == self.generation

    def unpin(self, pin: StorePin) -> None:
        self.held.remove(pin.pin_id)


class Played:
    """vLLM's scheduler, one request at a time; `now` is the test's clock."""

    def __init__(self, *present: str, encodes: bool = True, width: int = WIDTH) -> None:
        self.now = 100.0
        self.pins = FakePins(*present)
        self.items = WantedItems(
            self.pins,
            lambda identifier: identifier,
            lambda feature: encodes,
            TIMEOUT_S,
            width,
            lambda: self.now,
        )

    def schedule(self, asked: Any, num_computed: int = 0) -> tuple[bool, list[bool]]:
        """Whether the request is admitted, and for each item whether it is loaded."""
        if not self.items.admit_request(asked, num_computed):
            return False, []
        loaded = [self.items.has_item(each.identifier) for each in asked.mm_features]
        for each in asked.mm_features:
            self.items.on_allocated(each.identifier)
        return True, loaded


def request(name: str, *identifiers: str, rows: int = ROWS) -> Any:
    """Its items stand one after the other, each in ROWS tokens."""
    features = [
        SimpleNamespace(
            identifier=identifier,
            mm_position=SimpleNamespace(offset=ROWS * place, length=ROWS, get_num_embeds=lambda: rows),
        )
        for place, identifier in enumerate(identifiers)
    ]
    return SimpleNamespace(request_id=name, mm_features=features)


def test_a_pin_that_vllm_did_not_need_ends_when_the_item_is_computed() -> None:
    """Metadata alone: the item is pinned first, and then vLLM's encoder cache has it."""
    played = Played("a", encodes=False)
    played.items.admit_request(request("r", "a"), 0)
    assert played.pins.held
    played.items.on_computed("a")
    assert not played.pins.held


def test_the_store_is_not_asked_at_each_step() -> None:
    played, asked = Played(), request("r", "a")
    for _ in range(2):
        assert played.items.admit_request(asked, 0)
        assert not played.items.has_item("a")
    assert played.pins.asked == ["a"]
    played.now += ASK_AGAIN_S
    played.pins.present.add("a")
    assert played.schedule(asked) == (True, [True])


def test_each_wait_has_its_own_time() -> None:
    played, asked = Played(encodes=False), request("r", "a", "b")
    played.schedule(asked)
    played.now += TIMEOUT_S - ASK_AGAIN_S
    played.pins.present |= {"a", "b"}
    assert played.schedule(asked) == (True, [True, True])
    played.pins.present.clear()
    played.now += TIMEOUT_S
    assert played.schedule(asked) == (False, [])
    assert played.items.take_unavailable() == set()


def test_a_pin_of_an_earlier_store_is_asked_for_again() -> None:
    played, asked = Played("a"), request("r", "a")
    played.items.admit_request(asked, 0)
    played.items.has_item("a")
    played.pins.generation = 2
    assert played.schedule(asked) == (True, [True])
    loads, _ = played.items.take_step({"r": 4})
    assert loads["a"].descriptor.generation == 2
    assert played.pins.held == {loads["a"].pin_id}


def test_what_was_admitted_is_loaded_whatever_becomes_of_the_store() -> None:
    """vLLM would plan to encode it otherwise, and there is nothing to encode."""
    played, asked = Played("a", encodes=False), request("r", "a")
    assert played.items.admit_request(asked, 0)
    played.pins.generation = 2
    assert played.items.has_item("a")


def test_an_entry_with_other_rows_is_none() -> None:
    """Two images under one name, which callers may give."""
    played = Played("a")
    assert played.schedule(request("r", "a", rows=ROWS + 1)) == (True, [False])
    assert not played.pins.held


@pytest.mark.parametrize("num_items", [10, 5000])
def test_misses_are_forgotten(num_items: int) -> None:
    played = Played()
    for number in range(num_items):
        played.now += 1
        played.items.has_item(f"{number}")
    assert len(played.items._missed) <= 1000


@pytest.mark.parametrize(("width", "is_loaded"), [(WIDTH, True), (WIDTH // 2, True), (WIDTH + 1, False)])
def test_an_entry_of_another_width_is_none(width: int, is_loaded: bool) -> None:
    """Of another model with the same namespace; DeepStack's are several times as wide as the model."""
    played = Played("a", width=width)
    assert played.schedule(request("r", "a")) == (True, [is_loaded])
    assert len(played.pins.held) == is_loaded
