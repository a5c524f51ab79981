"""Allowance of a request's grammar: a leaky bucket."""

from triptych_vllm_connector.grammars.allowance import FREE_S, PER_STEP_S, PER_TOKEN_S, Allowance


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
