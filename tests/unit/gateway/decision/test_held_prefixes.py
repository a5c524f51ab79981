"""Which conversations an instance that decodes has answered."""

from typing import Any

import pytest

from tests.unit.gateway.decision.test_local_prefixes import request
from triptych_gateway.decision import prefixes as stored
from triptych_gateway.decision.prefixes import MAX_NEW_BYTES, HeldPrefixes

LIFE, OTHER = ("d-0", "boot"), ("d-1", "boot")


@pytest.mark.parametrize(
    ("next_turn", "is_held"),
    [
        ([["hello", "@a"]], True),
        ([["hello", "@a"], ["an answer"], ["and then"]], True),
        ([["hello", "@a"], ["x" * MAX_NEW_BYTES]], False),
        ([["hello", "@a"], ["an answer"], ["and", "@b"]], False),
        ([["hello", "@a"], ["an answer"], ["and", "@a"]], False),
        ([["hello", "@b"], ["and then"]], False),
        ([["good day", "@a"], ["and then"]], False),
        ([["hello"]], False),
    ],
)
def test_a_turn_that_only_adds_some_text_is_held(next_turn: list[list[str]], is_held: bool) -> None:
    held = HeldPrefixes()
    assert held.find(*request(*next_turn)) is None
    held.remember(*request(["hello", "@a"]), LIFE)
    assert held.find(*request(*next_turn)) == (LIFE if is_held else None)


def test_the_longest_beginning_counts() -> None:
    held = HeldPrefixes()
    held.remember(*request(["hello"]), LIFE)
    held.remember(*request(["hello"], ["an answer"], ["more"]), OTHER)
    assert held.find(*request(["hello"], ["an answer"], ["more"], ["further"])) == OTHER
    assert held.find(*request(["hello"], ["another answer"])) == LIFE


def test_another_tenant_or_prompt_is_not() -> None:
    held = HeldPrefixes()
    held.remember(*request(["hello"]), LIFE)
    assert held.find(*request(["hello"], salt="red")) is None
    asked, items = request(["hello"])
    asked.body["tools"] = [{"type": "function"}]
    assert held.find(asked, items) is None


def test_its_memory_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(stored, "MAX_HELD_PREFIXES", 4)
    held = HeldPrefixes()
    for number in range(9):
        held.remember(*request([f"hello {number}"]), LIFE)
    assert held.find(*request(["hello 0"])) is None
    assert held.find(*request(["hello 8"])) == LIFE
