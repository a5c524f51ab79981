"""A decision: the chosen one, the runner-up, and what made the difference."""

from typing import Any

from tests.support.gateway.routing import candidate, request
from triptych_gateway.routing.router import RoutingPolicy
from triptych_gateway.routing.scheduling.candidates import MAX_EXPLANATION, Candidate, RoutingDecision
from triptych_gateway.routing.scheduling.profiles import StageProfile

TEXT = b"text" * 256


def decide(*candidates: Candidate, asked: Any = None, **profile: Any) -> RoutingDecision:
    return RoutingPolicy.of("whole", StageProfile(**profile)).decide(asked or request(TEXT), candidates)


def test_the_scorer_that_speaks_most_for_the_chosen_one_is_the_reason() -> None:
    warm = candidate("a", num_requests=2, prefix_share=lambda prompt: 0.75)
    decision = decide(warm, candidate("b"), weights={"prefix": 2, "queue": 3})
    assert (decision.record.instance, decision.reason) == ("a", "prefix")
    assert decision.prefix_share == 0.75
    assert decision.explanation == "a 3.75 (prefix 1.5, queue 2.25); b 3 (queue 3)"
    decision = decide(warm, candidate("b"), weights={"prefix": 0.5, "queue": 3})
    assert (decision.record.instance, decision.reason) == ("b", "queue")
    assert decision.prefix_share == 0.0


def test_one_alone_is_not_scored_and_its_prompt_not_read() -> None:
    asked = request(TEXT)
    decision = decide(candidate("a"), asked=asked, weights={"prefix": 2})
    assert (decision.reason, decision.explanation, decision.prefix_share) == ("only", "a 0", None)
    assert not asked.is_prompt_read


def test_a_prompt_is_read_only_for_a_weight() -> None:
    asked = request(TEXT)
    decide(candidate("a"), candidate("b"), asked=asked, weights={"prefix": 0, "queue": 1})
    assert not asked.is_prompt_read


def test_equal_and_chance() -> None:
    assert decide(candidate("a"), candidate("b"), weights={"queue": 1}).reason == "equal"
    profile = {"weights": {"queue": 1}, "picker": "weighted_random"}
    known = (candidate("a"), candidate("b", num_requests=4))
    found = {decide(*known, **profile).reason for _ in range(200)}
    assert found == {"queue", "chance"}


def test_those_that_are_left_out_are_no_runners_up() -> None:
    decision = decide(candidate("a", is_suspect=True), candidate("b"), weights={"queue": 1})
    assert (decision.record.instance, decision.reason, decision.runner_up) == ("b", "only", None)


def test_an_explanation_is_bounded() -> None:
    known = [candidate(letter * 200) for letter in "ab"]
    assert len(decide(*known, weights={"queue": 1, "kv": 2}).explanation) == MAX_EXPLANATION
