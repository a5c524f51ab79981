"""CPU of a compiled grammar with each token is bounded in vLLM's own class."""

import json
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.vllm_connector.grammars import NUM_TOKENS, TOKENIZER, large_vocabulary
from triptych_vllm_connector.grammars import allowance, token_cost
from triptych_vllm_connector.grammars.allowance import FREE_S, exceeds_allowance
from triptych_vllm_connector.grammars.compile_server import compile_grammar
from triptych_vllm_connector.grammars.grammar_job import GrammarJob
from triptych_vllm_connector.grammars.token_cost import GROUP_FIELD, bound_token_cost

with warnings.catch_warnings(action="ignore"):  # importing torch warns
    import xgrammar
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

MAX_TOKENS = 1000
AMBIGUOUS = GrammarJob("ebnf", 'root ::= "a" | root root')  # cubic: its thousandth token takes a second


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fill_bitmask", "accept_tokens"):  # restored in the end
        monkeypatch.setattr(XgrammarGrammar, name, getattr(XgrammarGrammar, name))
    monkeypatch.setattr(StructuredOutputManager, "_create_grammar", lambda _, request: request.grammar)
    bound_token_cost()


def made(job: GrammarJob) -> XgrammarGrammar:
    return grammar_of(compile_grammar(job._asdict(), TOKENIZER), NUM_TOKENS)


def grammar_of(compiled: Any, num_tokens: int) -> XgrammarGrammar:
    return XgrammarGrammar(vocab_size=num_tokens, matcher=xgrammar.GrammarMatcher(compiled), ctx=compiled)


def choices_of(compiled: Any, num_tokens: int, number: int, *, group: str | None) -> list[XgrammarGrammar]:
    """The grammars of a request with `number` choices, as EngineCore makes them; `group` None: of as many."""
    made: list[XgrammarGrammar] = []
    for index in range(number):
        request = SimpleNamespace(
            request_id=f"{index}_request",
            sampling_params=SimpleNamespace(extra_args=group and {GROUP_FIELD: group}),
            grammar=grammar_of(compiled, num_tokens),
        )
        made.append(StructuredOutputManager._create_grammar(None, request))  # type: ignore[arg-type]
    return made


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
    monkeypatch.setattr(allowance, "FREE_S", -1.0)
    assert not grammar.accept_tokens("request", [ord("a")])
    monkeypatch.setattr(allowance, "FREE_S", 1000.0)
    assert not grammar.accept_tokens("request", [ord("a")])


@pytest.mark.parametrize("group", ["req-1", None], ids=["of one request", "of many"])
def test_all_choices_of_a_request_share_its_allowance(
    monkeypatch: pytest.MonkeyPatch, group: str | None
) -> None:
    """One step has them all. Requests of others have allowances of their own."""
    now, filled = [0.0], []

    def fill(matcher: Any, mask: Any, index: int) -> None:
        now[0] += FREE_S / 4
        filled.append(index)

    compiled = compile_grammar(GrammarJob("regex", "[a-z]*")._asdict(), TOKENIZER)
    choices = choices_of(compiled, NUM_TOKENS, 100, group=group)
    monkeypatch.setattr(token_cost, "time", SimpleNamespace(thread_time=lambda: now[0]))
    monkeypatch.setattr(xgrammar.GrammarMatcher, "fill_next_token_bitmask", fill)
    mask = xgrammar.allocate_token_bitmask(100, NUM_TOKENS)
    mask.fill_(0)
    for index, each in enumerate(choices):
        each.fill_bitmask(mask, index)
    assert filled == [*range(100 if group is None else 5)]
    accepted = [each.accept_tokens("request", [ord("a")]) for each in choices]
    assert not any(accepted) if group else all(accepted)
    assert group is None or mask[99].eq(-1).all(), "any token: it is refused"


SPACES = 256  # a token of 128 spaces, as many vocabularies have it
OF_SPACES = xgrammar.TokenizerInfo(
    [*(bytes([byte]) for byte in range(256)), b" " * 128, b"<eos>"],
    vocab_type=xgrammar.VocabType.RAW,
    vocab_size=258,
    stop_token_ids=[257],
)


def test_a_long_token_is_parsed_no_further_than_the_allowance_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 128 bytes cost cubic time in one call of xgrammar, which cannot be interrupted."""
    job = GrammarJob("ebnf", 'root ::= " " | root root | root root root')
    (grammar,) = choices_of(compile_grammar(job._asdict(), OF_SPACES), 258, 1, group="req-3")
    now, parsed = [0.0], []

    def parse(self: Any, text: bytes) -> bool:
        now[0] += FREE_S / 5
        parsed.append(text)
        return True

    monkeypatch.setattr(token_cost, "time", SimpleNamespace(thread_time=lambda: now[0]))
    monkeypatch.setattr(xgrammar.GrammarMatcher, "accept_string", parse)
    monkeypatch.setattr(xgrammar.GrammarMatcher, "rollback", lambda _, number: parsed.append(number))
    monkeypatch.setattr(xgrammar.GrammarMatcher, "accept_token", lambda *_: parsed.append("whole"))
    assert not grammar.accept_tokens("request", [SPACES])
    assert parsed == [*[b" " * token_cost.PIECE_BYTES] * 3, 3]


def test_a_long_token_that_is_cheap_is_accepted_once() -> None:
    (grammar,) = choices_of(
        compile_grammar(GrammarJob("regex", " {128}b| {256}")._asdict(), OF_SPACES), 258, 1, group="req-4"
    )
    assert grammar.accept_tokens("request", [SPACES, ord("b")])
    assert grammar.matcher.is_completed()


# ---- with a vocabulary as large as those of models that are served ------------------------------------
ALLOWED = {
    "object": {"type": "object"},
    "maxLength": {"type": "string", "maxLength": 200},
    "minLength": {"type": "string", "minLength": 200, "maxLength": 400},
    "enum": {"enum": [f"value {number}" for number in range(1000)]},
    "counted pattern": {"type": "string", "pattern": "^[a-z]{1,200}$"},
    "alternatives": {"anyOf": [{"type": "string", "pattern": f"^a{n}[a-z]*$"} for n in range(100)]},
}
REFUSED = {
    "any character": {"type": "string", "pattern": "^.{1,500}$"},
    "classes": {"type": "string", "pattern": "^[a-zA-Z0-9 ]{1,2000}$"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALLOWED, *REFUSED])
def test_grammars_are_allowed_or_refused_by_their_cost_with_150000_tokens(name: str) -> None:
    tokenizer = large_vocabulary()
    assert tokenizer.vocab_size > 150_000
    schema = {**ALLOWED, **REFUSED}[name]
    compiled = compile_grammar(GrammarJob("json", json.dumps(schema))._asdict(), tokenizer)
    assert exceeds_allowance(compiled, tokenizer.vocab_size) == (name in REFUSED)


@pytest.mark.slow
def test_a_step_with_128_choices_and_150000_tokens_takes_no_more_than_the_allowance() -> None:
    """A fill of this grammar takes 30 ms; it is one that no walk has refused."""
    tokenizer = large_vocabulary()
    compiled = compile_grammar(GrammarJob("json", json.dumps(REFUSED["any character"]))._asdict(), tokenizer)
    choices = choices_of(compiled, tokenizer.vocab_size, 128, group="req-2")
    mask = xgrammar.allocate_token_bitmask(128, tokenizer.vocab_size)
    for each in choices:
        assert each.accept_tokens("request", [ord('"')])  # the first 256 tokens are the bytes
    for step in range(3):
        began_s = time.thread_time()
        for index, each in enumerate(choices):
            each.fill_bitmask(mask, index)
        assert time.thread_time() - began_s < 2 * FREE_S, step
        for each in choices:
            each.accept_tokens("request", [ord("a")])
    assert not any(each.accept_tokens("request", [ord("a")]) for each in choices)
