"""Filters leave candidates out, unless all of them would be."""

from tests.support.gateway.routing import candidate, request
from triptych_gateway.routing.router import RoutingPolicy
from triptych_gateway.routing.scheduling.candidates import Candidate
from triptych_gateway.routing.scheduling.profiles import StageProfile


def chosen(*candidates: Candidate, **profile: object) -> str:
    policy = RoutingPolicy.of("whole", StageProfile.model_validate(profile))
    return policy.decide(request(), candidates).record.instance


def test_a_suspect_is_left_while_there_is_another() -> None:
    suspect = candidate("a", is_suspect=True, prefix_share=lambda prompt: 1.0)
    assert chosen(suspect, candidate("b"), weights={"prefix": 5}) == "b"
    assert chosen(suspect, weights={"prefix": 5}) == "a"
    assert chosen(suspect, candidate("b", is_suspect=True), weights={"prefix": 5}) == "a"
    assert chosen(suspect, candidate("b"), weights={"prefix": 5}, filters=()) == "a"


def test_a_full_one_is_left_unless_all_are_and_a_suspect_is_worse() -> None:
    full = candidate("a", kv_usage=0.96)
    assert chosen(full, candidate("b", picked_at=9)) == "b"
    assert chosen(full, candidate("b", kv_usage=0.99, picked_at=9)) == "a"
    assert chosen(full, candidate("b", picked_at=9), full_above=0.97) == "a"
    assert chosen(full, candidate("b", is_suspect=True)) == "a", "a suspect may not answer at all"
