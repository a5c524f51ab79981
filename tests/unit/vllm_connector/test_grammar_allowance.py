"""Allowance of a request's grammar: a leaky bucket, and a share of what all of a step may take."""

from triptych_vllm_connector.grammars.allowance import (
    FREE_S,
    PER_STEP_S,
    PER_TOKEN_S,
    SHARED_DEBT_S,
    Allowance,
    EngineStep,
)


def test_what_cheap_tokens_leave_is_not_kept_for_later_steps() -> None:
    allowance = Allowance()
    for number in range(1, 10_001):
        assert allowance.take(PER_STEP_S / 10)
        allowance.earn(number, 1)
    assert allowance.take(FREE_S)
    assert not allowance.take(PER_STEP_S), "ten thousand cheap tokens bring no more than none"


def test_tokens_that_cost_what_they_earn_go_on_for_ever() -> None:
    allowance = Allowance()
    for number in range(1, 1001):
        assert allowance.take(PER_STEP_S + PER_TOKEN_S)
        allowance.earn(number, 1)


def test_a_step_earns_once_for_all_choices() -> None:
    allowance = Allowance(debt_s=1.0)
    for _ in range(128):
        allowance.earn(1, 1)
    assert abs(1.0 - allowance.debt_s - PER_STEP_S - 128 * PER_TOKEN_S) < 1e-9
    assert (allowance.num_steps, allowance.num_tokens) == (1, 128)


def test_a_step_that_is_full_ends_those_that_owe_more_than_a_share() -> None:
    step = EngineStep()
    costly = [Allowance() for _ in range(64)]
    allowed = [step.take(each, 1.1 * SHARED_DEBT_S) for each in costly]
    assert allowed == [True] * 4 + [False] * 60
    assert not step.take(costly[0], 2 * PER_STEP_S)


def test_a_step_that_is_full_ends_nobody_who_owes_less() -> None:
    step = EngineStep()
    assert all(step.take(Allowance(), 0.9 * SHARED_DEBT_S) for _ in range(64))
    assert step.cpu_s > 10 * FREE_S


def test_a_call_that_a_step_pays_for_ends_nobody_in_a_full_step() -> None:
    step, ours = EngineStep(), Allowance()
    for _ in range(64):
        step.take(Allowance(), FREE_S)
    for _ in range(int(FREE_S / PER_STEP_S) - 1):
        assert step.take(ours, PER_STEP_S)
    assert ours.debt_s > SHARED_DEBT_S


def test_the_next_step_begins_empty() -> None:
    step = EngineStep()
    step.take(Allowance(), FREE_S)
    step.begin()
    assert step.take(Allowance(), FREE_S)


def test_each_step_has_a_number_of_its_own() -> None:
    step = EngineStep()
    numbers = [step.number]
    for _ in range(2):
        step.begin()
        numbers.append(step.number)
    assert len(set(numbers)) == 3
