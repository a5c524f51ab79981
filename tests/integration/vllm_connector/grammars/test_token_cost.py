"""CPU of a compiled grammar with each token is bounded in vLLM's own class."""

import warnings
from typing import Any

import pytest

from tests.support.vllm_connector.grammars import NUM_TOKENS, TOKENIZER
from triptych_vllm_connector.grammars import token_cost
from triptych_vllm_connector.grammars.compile_server import compile_grammar
from triptych_vllm_connector.grammars.grammar_job import GrammarJob
from triptych_vllm_connector.grammars.token_cost import bound_token_cost

with warnings.catch_warnings(action="ignore"):  # importing torch warns
    import xgrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

MAX_TOKENS = 1000
AMBIGUOUS = GrammarJob("ebnf", 'root ::= "a" | root root')  # cubic: its thousandth token takes a second


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fill_bitmask", "accept_tokens"):  # restored in the end
        monkeypatch.setattr(XgrammarGrammar, name, getattr(XgrammarGrammar, name))
    bound_token_cost()


def made(job: GrammarJob) -> XgrammarGrammar:
    compiled: Any = compile_grammar(job._asdict(), TOKENIZER)
    return XgrammarGrammar(vocab_size=NUM_TOKENS, matcher=xgrammar.GrammarMatcher(compiled), ctx=compiled)


def num_accepted(job: GrammarJob) -> int:
    """Return how many tokens a request with this grammar gets, `MAX_TOKENS` at most."""
    grammar = made(job)
    bitmask = xgrammar.allocate_token_bitmask(1, NUM_TOKENS)
    for number in range(MAX_TOKENS):
        grammar.fill_bitmask(bitmask, 0)
        if not grammar.accept_tokens("request", [ord("a")]):
            return number
    return MAX_TOKENS


def test_a_grammar_whose_cost_grows_with_the_answer_ends_its_request() -> None:
    assert num_accepted(AMBIGUOUS) < MAX_TOKENS


@pytest.mark.parametrize(
    "job", [GrammarJob("regex", "[a-z]*"), GrammarJob("ebnf", 'root ::= "a" root | "a"')]
)
def test_ordinary_grammars_have_all_their_tokens(job: GrammarJob) -> None:
    assert num_accepted(job) == MAX_TOKENS


def test_a_refused_draft_token_ends_its_request_though_later_ones_cost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM takes back the draft tokens that were accepted, so the refused one stays in the matcher."""
    grammar = made(GrammarJob("regex", "[a-z]*"))
    monkeypatch.setattr(token_cost, "FREE_S", -1.0)
    assert not grammar.accept_tokens("request", [ord("a")])
    monkeypatch.setattr(token_cost, "FREE_S", 1000.0)
    assert not grammar.accept_tokens("request", [ord("a")])
