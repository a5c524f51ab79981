"""Prompts of several flows take turns; those of one go as they came."""

from hypothesis import given
from hypothesis import strategies as st

from triptych_vllm_connector.scheduler.prefill_fairness import PrefillFairness

COST = 100


def served(turns: PrefillFairness, waiting: list[str]) -> list[str]:
    """The order in which an engine that computes one prompt at a time takes them."""
    order = []
    while waiting:
        first = min(waiting, key=turns.tag_of)
        turns.begin_prompt(first)
        waiting.remove(first)
        order.append(first)
    return order


def begin(turns: PrefillFairness, flow: str, count: int) -> None:
    """So many requests of a flow, from number 0, each begun when it has come."""
    for number in range(count):
        turns.add_request(f"{flow}{number}", flow, COST)
        turns.begin_prompt(f"{flow}{number}")


def test_one_flow_is_served_as_it_came() -> None:
    turns = PrefillFairness()
    names = [f"r{number}" for number in range(5)]
    for name in names:
        turns.add_request(name, "", COST)
    assert not turns.are_several
    assert served(turns, [*names]) == names


def test_a_flow_with_one_request_waits_for_no_more_than_the_prompt_that_is_computed() -> None:
    turns = PrefillFairness()
    flood = [f"f{number}" for number in range(20)]
    for name in flood:
        turns.add_request(name, "f", COST)
    turns.begin_prompt(flood[0])
    turns.add_request("one", "1", COST)
    assert turns.are_several
    assert served(turns, [*flood[1:], "one"])[0] == "one"


def test_a_flow_that_was_alone_for_long_is_not_held_back_for_it() -> None:
    turns = PrefillFairness()
    for number in range(100):
        turns.add_request(f"a{number}", "a", COST)
        turns.begin_prompt(f"a{number}")
        turns.remove_request(f"a{number}")
    names = [f"{flow}-{number}" for number in range(3) for flow in "ab"]
    for name in names:
        turns.add_request(name, name[0], COST)
    order = served(turns, [*names])
    assert {*order[:3]} & {"a-0", "a-1"}
    assert {*order[:3]} & {"b-0", "b-1"}


def test_what_has_ended_is_forgotten() -> None:
    turns = PrefillFairness()
    turns.add_request("a", "a", COST)
    turns.add_request("b", "b", COST)
    turns.remove_request("a")
    turns.remove_request("a")
    turns.begin_prompt("a")
    assert not turns.are_several
    turns.remove_request("b")
    assert not {*turns._tags, *turns._flows, *turns._num_requests}
    turns.add_request("c", "c", COST)
    turns.begin_prompt("c")
    turns.add_request("d", "c", COST)
    turns.begin_prompt("d")
    assert {*turns._ends} == {"c"}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=40))
def test_no_flow_gets_more_than_another_by_more_than_a_turn_of_each(asked: list[tuple[str, int]]) -> None:
    """While both have requests that wait (the theorem of start-time fair queueing)."""
    turns, cost = PrefillFairness(), {}
    for number, (flow, tokens) in enumerate(asked):
        turns.add_request(f"{flow}{number}", flow, tokens)
        cost[f"{flow}{number}"] = tokens
    left = [*cost]
    got = dict.fromkeys("abc", 0)
    for name in served(turns, [*cost]):
        left.remove(name)
        got[name[0]] += cost[name]
        waiting = {each[0] for each in left}
        for one in waiting:
            for other in waiting:
                assert got[one] - got[other] <= 2 * max(cost.values())


def test_what_ends_before_its_turn_has_cost_nothing() -> None:
    """Else a caller that gives up and asks again falls behind by what it never got."""
    turns = PrefillFairness()
    turns.add_request("busy", "f", COST)
    turns.begin_prompt("busy")
    for number in range(50):
        turns.add_request(f"late{number}", "1", COST)
        turns.remove_request(f"late{number}")
    turns.add_request("next", "f", COST)
    turns.add_request("one", "1", COST)
    assert served(turns, ["next", "one"]) == ["one", "next"]


def test_a_request_that_is_added_again_has_one_turn() -> None:
    turns = PrefillFairness()
    for _ in range(2):
        turns.add_request("a", "a", COST)
    turns.add_request("b", "b", COST)
    turns.remove_request("a")
    assert not turns.are_several


def test_who_was_passed_over_is_late() -> None:
    turns = PrefillFairness()
    turns.add_request("one", "1", COST)
    begin(turns, "f", 2)
    assert turns.is_late("one")
    assert not turns.is_late("f1")
    turns.add_request("two", "2", COST)
    assert not turns.is_late("two"), "it has just come"


def test_no_request_is_late_for_another_of_its_own_flow() -> None:
    turns = PrefillFairness()
    for number in range(3):
        turns.add_request(f"f{number}", "f", COST)
    turns.add_request("one", "1", 3 * COST)
    turns.begin_prompt("f1")  # its image came first
    assert not turns.is_late("f0")
    assert turns.is_late("one")
    turns.add_request("two", "2", COST)
    turns.begin_prompt("two")
    assert turns.is_late("f0"), "another flow's turn, after its own"
    turns.begin_prompt("f2")
    assert not turns.is_late("f2")
    assert turns.is_late("two")
    assert turns.is_late("f0")


def test_a_flood_is_ahead_and_a_flow_that_asks_for_little_is_not() -> None:
    turns = PrefillFairness()
    turns.add_request("one", "1", COST)
    begin(turns, "f", 3)
    turns.add_request("text", "", COST // 4)
    turns.begin_prompt("text")
    assert not turns.is_ahead("f2", "one"), "it has what it asked for, and no more than the other asks for"
    turns.add_request("f3", "f", COST)
    assert not turns.is_ahead("f2", "one"), "one more is not many"
    turns.add_request("f4", "f", COST)
    assert turns.is_ahead("f2", "one")
    assert not turns.is_ahead("text", "one")
    for number in range(5):
        turns.add_request(f"text{number}", "", 10 * COST)
    assert not turns.is_ahead("text", "one"), "texts of all callers are one flow"
    turns.remove_request("f3")
    assert not turns.is_ahead("f2", "one"), "what ended before its turn has cost nothing"
    assert not turns.is_ahead("gone", "one")
