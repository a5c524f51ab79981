"""Remote or local, and why."""

from dataclasses import replace
from typing import Any

import pytest

from triptych_gateway.decision.decision_policy import (
    EXPLORED_SHARE,
    MARGIN,
    UNMEASURED_MARGIN,
    DecisionFacts,
    DecisionMode,
    DecisionPolicy,
    DecisionReason,
    EncodeWay,
)
from triptych_gateway.decision.prediction import Prediction

LOCAL, REMOTE = EncodeWay.LOCAL, EncodeWay.REMOTE
NEW = DecisionFacts(
    num_items=1,
    num_new_items=1,
    num_unknown_items=1,
    has_tower=True,
    needs_encoder=False,
    has_encoder=True,
    encoder_may_return=True,
    is_stream=True,
    is_idle=True,
)
KNOWN = {"num_new_items": 0, "num_unknown_items": 0}
ALONE = {"has_encoder": False, "encoder_may_return": False}


def seconds(remote_s: float, local_s: float, *, is_measured: bool = True) -> Prediction:
    return Prediction(remote_s, local_s, 0.0, 0.0, 0.0, remote_s, 0.0, local_s, is_measured)


@pytest.mark.parametrize(
    ("mode", "changes", "way", "reason"),
    [
        ("auto", {"num_items": 0, **KNOWN}, REMOTE, DecisionReason.TEXT_ONLY),
        ("local", {"has_tower": False}, REMOTE, DecisionReason.NO_TOWER),
        ("local", {"needs_encoder": True}, REMOTE, DecisionReason.FOR_ENCODERS),
        ("remote", {"needs_encoder": True, **ALONE}, REMOTE, DecisionReason.FOR_ENCODERS),
        ("local", KNOWN, LOCAL, DecisionReason.FORCED),
        ("auto", KNOWN, REMOTE, DecisionReason.SIZES_KNOWN),
        ("remote", {**KNOWN, **ALONE}, REMOTE, DecisionReason.SIZES_KNOWN),
        ("remote", {}, REMOTE, DecisionReason.FORCED),
        ("remote", ALONE, LOCAL, DecisionReason.NO_ENCODER),
        ("auto", ALONE, LOCAL, DecisionReason.NO_ENCODER),
        ("auto", {"has_encoder": False}, REMOTE, DecisionReason.ENCODER_RETURNS),
        ("remote", {"has_encoder": False}, REMOTE, DecisionReason.FORCED),
        ("auto", {"num_new_items": 0}, REMOTE, DecisionReason.IN_FLIGHT),
        ("auto", {"is_predictable": False}, REMOTE, DecisionReason.FOR_ENCODERS),
        ("auto", {"is_predictable": False, **ALONE}, LOCAL, DecisionReason.NO_ENCODER),
        ("local", {"is_predictable": False}, LOCAL, DecisionReason.FORCED),
    ],
)
def test_rules(mode: DecisionMode, changes: dict[str, Any], way: EncodeWay, reason: DecisionReason) -> None:
    decision = DecisionPolicy(mode).rule(replace(NEW, **changes))
    assert decision is not None
    assert (decision.way, decision.reason) == (way, reason)


def test_what_no_rule_decides() -> None:
    policy = DecisionPolicy("auto")
    assert policy.rule(NEW) is None
    assert policy.break_even(NEW, None).reason is DecisionReason.COSTS_UNKNOWN


def test_on_the_encoders_cores_small_items_are_encoded_where_they_are_needed() -> None:
    small = replace(seconds(1.0, 2.0), is_small=True)
    on_gpu = replace(NEW, shares_compute=True)
    assert DecisionPolicy("auto").break_even(on_gpu, small).reason is DecisionReason.SHARED_COMPUTE
    decision = DecisionPolicy("auto").break_even(replace(on_gpu, shares_cores=True), small)
    assert (decision.way, decision.reason, decision.needs_room) == (LOCAL, DecisionReason.TOO_SMALL, True)
    large = DecisionPolicy("auto").break_even(replace(on_gpu, shares_cores=True), seconds(1.0, 0.5))
    assert (large.reason, large.needs_room) == (DecisionReason.SHARED_COMPUTE, False)


def test_it_begins_ahead_and_ends_behind() -> None:
    policy = DecisionPolicy("auto")
    between = seconds(1.0, 1.0 - MARGIN / 2)
    assert policy.break_even(NEW, between).reason is DecisionReason.BELOW_BREAK_EVEN
    assert policy.break_even(NEW, seconds(1.0, 0.9)).reason is DecisionReason.TOO_SMALL
    assert policy._is_helping
    assert policy.break_even(NEW, between).way is LOCAL
    assert policy.break_even(NEW, seconds(1.0, 1.01)).way is REMOTE
    assert policy.break_even(NEW, between).way is REMOTE


def test_the_reason_says_what_makes_the_instance_quicker() -> None:
    quick, queued = seconds(1.0, 0.5), replace(seconds(1.0, 0.5), queue_s=0.4)
    for facts, prediction, reason in (
        (NEW, quick, DecisionReason.TOO_SMALL),
        (NEW, queued, DecisionReason.ENCODERS_SLOWER),
        (replace(NEW, is_covered=True), queued, DecisionReason.PREFIX_COVERED),
        (NEW, replace(quick, transfer_s=0.6), DecisionReason.ENCODERS_FAR),
        (NEW, replace(quick, transfer_s=0.1), DecisionReason.TOO_SMALL),  # quicker without it, too
        (NEW, replace(queued, transfer_s=0.6), DecisionReason.ENCODERS_FAR),
        (replace(NEW, is_covered=True), replace(quick, transfer_s=0.6), DecisionReason.PREFIX_COVERED),
    ):
        assert DecisionPolicy("auto").break_even(facts, prediction).reason is reason


def test_what_a_request_asks_for_takes_the_place_of_the_setting() -> None:
    modes: tuple[DecisionMode, ...] = ("auto", "remote", "local")
    for mode in modes:
        policy = DecisionPolicy(mode)
        assert policy.rule(NEW, "auto") is None
        for asked, way in (("remote", REMOTE), ("local", LOCAL)):
            decision = policy.rule(NEW, asked)
            assert decision is not None
            assert (decision.way, decision.reason) == (way, DecisionReason.REQUESTED)
        nothing = policy.rule(replace(NEW, num_items=0, **KNOWN), "local")
        assert nothing is not None
        assert nothing.reason is DecisionReason.TEXT_ONLY


def test_a_burden_counts() -> None:
    stalled = replace(seconds(1.0, 0.5), local_burden_s=0.6)
    assert DecisionPolicy("auto").break_even(NEW, stalled).way is REMOTE


def test_what_was_not_measured_must_be_far_ahead() -> None:
    policy = DecisionPolicy("auto")
    near = seconds(1.0, 1.0 - UNMEASURED_MARGIN / 2, is_measured=False)
    far = seconds(1.0, 0.9 - UNMEASURED_MARGIN, is_measured=False)
    assert policy.break_even(NEW, near).way is REMOTE
    assert policy.break_even(NEW, far).way is LOCAL
    assert policy.break_even(NEW, near).way is REMOTE


def explored(facts: DecisionFacts, prediction: Prediction, num: int = 1000) -> int:
    policy = DecisionPolicy("auto")
    ways = [policy.break_even(facts, prediction) for _ in range(num)]
    return sum(each.reason is DecisionReason.EXPLORATION for each in ways)


def test_exploration_is_a_bounded_share() -> None:
    unmeasured = seconds(1.0, 1.1, is_measured=False)
    assert explored(NEW, unmeasured) == pytest.approx(EXPLORED_SHARE * 1000, abs=1)
    assert explored(NEW, unmeasured, num=int(1 / EXPLORED_SHARE) - 1) == 0
    assert EXPLORED_SHARE <= 0.03


def test_there_is_no_exploration_where_it_could_hurt() -> None:
    assert explored(NEW, seconds(1.0, 1.1)) == 0  # known
    assert explored(NEW, seconds(1.0, 3.0, is_measured=False)) == 0
    near = seconds(1.0, 1.1, is_measured=False)
    assert explored(replace(NEW, is_idle=False), near) == 0
    assert explored(replace(NEW, is_stream=False), near) == 0  # nothing would be learned
