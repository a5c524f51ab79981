"""On which cores an engine computes, by policy and by what the others do."""

import pytest

from triptych_common.cores.plan import CORE_POLICIES, CorePolicy
from triptych_common.cores.sharing import DECODE_HOLD_NS, EngineLoad, Work, cores_for

NOW = 10 * DECODE_HOLD_NS
LONG_AGO = 0
OWN, HOST = frozenset({0}), frozenset({0, 1})


def load(work: Work, *cores: int) -> EngineLoad:
    return EngineLoad(work, frozenset(cores or {1}), NOW)


IDLE = EngineLoad(Work.IDLE, frozenset({1}), LONG_AGO, Work.DECODE)


@pytest.mark.parametrize(
    ("policy", "others", "cores"),
    [
        ("split", [], {0}),
        ("split", [IDLE], {0}),
        ("text_first", [], {0, 1}),
        ("text_first", [IDLE], {0, 1}),
        ("text_first", [load(Work.DECODE)], {0}),
        ("text_first", [load(Work.PREFILL)], {0}),
        ("text_first", [load(Work.ENCODE)], {0}),
        ("text_first", [load(Work.CHUNK)], {0}),
        ("image_first", [load(Work.DECODE)], {0, 1}),
        ("image_first", [load(Work.PREFILL)], {0}),
        ("image_first", [load(Work.ENCODE)], {0}),
        ("image_first", [load(Work.CHUNK)], {0}),
    ],
)
def test_two_cores(policy: CorePolicy, others: list[EngineLoad], cores: set[int]) -> None:
    assert cores_for(policy, OWN, HOST, others, NOW) == cores


@pytest.mark.parametrize(
    ("policy", "other", "cores"),
    [
        ("text_first", Work.ENCODE, {0, 1}),
        ("text_first", Work.PREFILL, {0}),
        ("text_first", Work.CHUNK, {0}),
        ("text_first", Work.DECODE, {0}),
        ("image_first", Work.ENCODE, {0}),
        ("split", Work.ENCODE, {0}),
    ],
)
def test_from_a_late_prompt_an_encode_keeps_no_core(policy: CorePolicy, other: Work, cores: set[int]) -> None:
    assert cores_for(policy, OWN, HOST, [load(other)], NOW, is_late=True) == cores


@pytest.mark.parametrize(
    ("ago_ns", "before", "cores"),
    [
        (0, Work.DECODE, {0}),
        (DECODE_HOLD_NS - 1, Work.DECODE, {0}),
        (DECODE_HOLD_NS - 1, Work.CHUNK, {0}),
        (DECODE_HOLD_NS, Work.DECODE, {0, 1}),
        (0, Work.PREFILL, {0, 1}),
        (0, Work.ENCODE, {0, 1}),
    ],
)
def test_core_between_two_steps_of_text_is_not_idle(ago_ns: int, before: Work, cores: set[int]) -> None:
    between = EngineLoad(Work.IDLE, frozenset({1}), NOW - ago_ns, before)
    assert cores_for("text_first", OWN, HOST, [between], NOW) == cores


def test_cores_that_nobody_owns_are_borrowed_too() -> None:
    others = [load(Work.DECODE, 2, 3), EngineLoad(Work.IDLE, frozenset({4, 5}), LONG_AGO, Work.ENCODE)]
    assert cores_for("text_first", frozenset({0, 1}), frozenset(range(7)), others, NOW) == {0, 1, 4, 5, 6}


@pytest.mark.parametrize("policy", CORE_POLICIES)
def test_own_cores_are_never_lost(policy: CorePolicy) -> None:
    """Also where there are more engines than cores, so that several own the same."""
    busy = [load(work, 0, 1) for work in Work]
    assert cores_for(policy, OWN, HOST, busy, NOW) == OWN
