"""CPU of a compiled grammar with each token is bounded in vLLM's own class."""

import gc
import json
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.vllm_connector.grammars import (
    NUM_TOKENS,
    TOKENIZER,
    large_vocabulary,
)
from triptych_vllm_connector.grammars import allowance, token_cost
from triptych_vllm_connector.grammars.allowance import FREE_S, PER_STEP_S, exceeds_allowance, longest_runs
from triptych_vllm_connector.grammars.compile_server import compile_grammar
from triptych_vllm_connector.grammars.grammar_job import GrammarJob
from triptych_vllm_connector.grammars.token_cost import GROUP_FIELD, bound_token_cost

with warnings.catch_warnings(action="ignore"):  # importing torch warns
    import torch
    import xgrammar
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

MAX_TOKENS = 1000
AMBIGUOUS = GrammarJob("ebnf", 'root ::= "a" | root root')  # cubic: its thousandth token takes a second


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, names in (
        (XgrammarGrammar, ("fill_bitmask", "accept_tokens", "validate_tokens", "rollback")),
        (StructuredOutputManager, ("grammar_bitmask",)),
    ):
        for name in names:  # restored in the end
            monkeypatch.setattr(owner, name, getattr(owner, name))
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
        made.append(StructuredOutputManager._create_grammar(None, request))
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


def test_a_grammar_is_freed_with_its_last_use() -> None:
    """Its memory is xgrammar's: a collector of circles would not know how much it is."""
    grammar = made(GrammarJob("regex", "[a-z]*"))
    grammar.fill_bitmask(xgrammar.allocate_token_bitmask(1, NUM_TOKENS), 0)
    is_freed = weakref.ref(grammar)
    gc.disable()
    try:
        del grammar
        assert is_freed() is None
    finally:
        gc.enable()


def test_a_refused_draft_token_ends_its_request_though_later_ones_cost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM takes back the draft tokens that were accepted, so the refused one stays in the matcher."""
    grammar = made(GrammarJob("regex", "[a-z]*"))
    monkeypatch.setattr(allowance, "FREE_S", -1.0)
    assert not grammar.accept_tokens("request", [ord("a")])
    monkeypatch.setattr(allowance, "FREE_S", 1000.0)
    assert not grammar.accept_tokens("request", [ord("a")])


def test_masks_for_draft_tokens_of_one_step_earn_what_they_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step makes a mask for each draft token of a request, and may have the model reject all of them."""
    compiled = compile_grammar(GrammarJob("regex", "[a-z]*")._asdict(), TOKENIZER)
    (grammar,) = choices_of(compiled, NUM_TOKENS, 1, group="req-1")
    now = [0.0]

    def fill(matcher: Any, mask: Any, index: int) -> None:
        now[0] += PER_STEP_S

    monkeypatch.setattr(token_cost, "time", SimpleNamespace(thread_time=lambda: now[0]))
    monkeypatch.setattr(xgrammar.GrammarMatcher, "fill_next_token_bitmask", fill)
    mask = xgrammar.allocate_token_bitmask(1, NUM_TOKENS)
    for _ in range(int(FREE_S / PER_STEP_S) * 4):
        grammar.fill_bitmask(mask, 0)
    assert grammar.accept_tokens("request", [ord("a")])


@pytest.mark.parametrize("group", ["req-1", None], ids=["of one request", "of many"])
def test_all_choices_of_a_request_share_its_allowance(
    monkeypatch: pytest.MonkeyPatch, group: str | None
) -> None:
    """One step has them all. Requests of others have allowances of their own."""
    now, filled = [0.0], []

    def fill(matcher: Any, mask: Any, index: int) -> None:
        now[0] += FREE_S / 5.5
        filled.append(matcher)

    compiled = compile_grammar(GrammarJob("regex", "[a-z]*")._asdict(), TOKENIZER)
    choices = choices_of(compiled, NUM_TOKENS, 100, group=group)
    monkeypatch.setattr(token_cost, "time", SimpleNamespace(thread_time=lambda: now[0]))
    monkeypatch.setattr(xgrammar.GrammarMatcher, "fill_next_token_bitmask", fill)
    mask = xgrammar.allocate_token_bitmask(100, NUM_TOKENS)
    mask.fill_(0)
    for index, each in enumerate(choices):
        each.fill_bitmask(mask, index)
    assert filled == [each.matcher for each in choices[: 100 if group is None else 6]]
    accepted = [each.accept_tokens("request", [ord("a")]) for each in choices]
    assert not any(accepted) if group else all(accepted)
    assert group is None or mask[99].eq(-1).all(), "any token: it is refused"


class Engine:
    """Steps of an engine with vLLM's `StructuredOutputManager`, on a clock that counts masks alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0  # of all threads
        self.num_tokens = NUM_TOKENS
        self.costs_s: dict[int, list[float]] = {}  # of a grammar's next masks, by the id of its matcher
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(distributed_executor_backend=None),
            scheduler_config=SimpleNamespace(max_num_seqs=1024),
            model_config=SimpleNamespace(skip_tokenizer_init=True, is_diffusion=False),
            structured_outputs_config=SimpleNamespace(enable_in_reasoning=True),
            num_speculative_tokens=0,
        )
        self.manager = StructuredOutputManager(config)
        self.manager.backend = SimpleNamespace(
            allocate_token_bitmask=lambda num_rows: xgrammar.allocate_token_bitmask(num_rows, self.num_tokens)
        )
        fill, lock, thread = (
            xgrammar.GrammarMatcher.fill_next_token_bitmask,
            threading.Lock(),
            threading.local(),
        )

        def fill_at_cost(matcher: Any, *args: Any) -> Any:
            costs = self.costs_s.get(id(matcher))
            cost_s = costs.pop(0) if costs else 0.0
            thread.now_s = getattr(thread, "now_s", 0.0) + cost_s
            with lock:
                self.now_s += cost_s
            return fill(matcher, *args)

        def thread_time() -> float:
            return float(getattr(thread, "now_s", 0.0))

        monkeypatch.setattr(xgrammar.GrammarMatcher, "fill_next_token_bitmask", fill_at_cost)
        monkeypatch.setattr(token_cost, "time", SimpleNamespace(thread_time=thread_time))

    def step(self, grammars: Mapping[str, XgrammarGrammar], token: int) -> list[str]:
        """Fill the masks of all requests, and accept `token` for each; return those that have ended."""
        requests: dict[str, Any] = {
            name: SimpleNamespace(
                request_id=name,
                use_structured_output=True,
                structured_output_request=SimpleNamespace(grammar=grammar),
            )
            for name, grammar in grammars.items()
        }
        self.manager.grammar_bitmask(requests, [*requests], {})
        return [name for name, each in requests.items() if not self.manager.accept_tokens(each, [token])]

    def run(self, costs_s: Mapping[str, list[float]], num_steps: int) -> set[str]:
        """Return the requests that end within the steps, of those whose masks cost as much."""
        compiled = compile_grammar(GrammarJob("regex", "[a-z]*")._asdict(), TOKENIZER)
        running = {name: choices_of(compiled, NUM_TOKENS, 1, group=name)[0] for name in costs_s}
        for name, grammar in running.items():
            self.costs_s[id(grammar.matcher)] = [*costs_s[name]]
        ended = set()
        for _ in range(num_steps):
            gone = self.step(running, ord("a"))
            ended |= {*gone}
            for name in gone:
                del running[name]
        return ended


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = Engine(monkeypatch)
    yield made
    made.manager.executor_for_fillmask.shutdown()


@pytest.mark.parametrize("number", [64, 256], ids=["in one thread", "in several"])
def test_costly_grammars_of_many_requests_share_a_step(engine: Engine, number: int) -> None:
    """Each alone would be within its allowance for five steps."""
    costs_s = {f"req-{each}": [0.06] * 5 for each in range(number)}
    assert engine.run(costs_s, 5) == {*costs_s}
    assert engine.now_s <= FREE_S + 2 * 0.06 * number


STRING_S = 0.0027  # of a mask behind which 20 strings with a `maxLength` may begin
DEAR_S = 0.03


def test_honest_requests_go_on_beside_costly_ones(engine: Engine) -> None:
    """64 begin a string in the same step and in others, one has a dear mask; together they exceed a share."""
    honest = {f"req-{each}": [STRING_S] * 40 for each in range(64)}
    honest |= {"req-64": [DEAR_S] + [STRING_S] * 39, **{f"req-{65 + each}": [DEAR_S] for each in range(16)}}
    assert sum(each[0] for each in honest.values()) > 2 * FREE_S
    hostile = {f"req-{128 + each}": [0.2] * 40 for each in range(8)}
    assert engine.run({**hostile, **honest}, 40) == {*hostile}


def test_choices_of_an_honest_request_go_on_in_a_step_that_others_fill(engine: Engine) -> None:
    """Together they owe more than a costly request may, each call less than a step earns."""
    compiled = compile_grammar(GrammarJob("regex", "[a-z]*")._asdict(), TOKENIZER)
    grammars = {
        f"{group}-{index}": each
        for group, number in (("req-200", 40), ("req-201", 64), ("req-202", 80))
        for index, each in enumerate(choices_of(compiled, NUM_TOKENS, number, group=group))
    }
    for each in grammars.values():
        engine.costs_s[id(each.matcher)] = [STRING_S]
    assert not engine.step(grammars, ord("a"))
    assert engine.now_s > FREE_S


def test_a_draft_token_is_valid_as_vllm_says(monkeypatch: pytest.MonkeyPatch) -> None:
    validate = XgrammarGrammar.validate_tokens.__wrapped__
    for pattern, texts in (("[a-z]*1", ("abc1", "a1b", "1", "-a", "ab-", "")), (" {128}b", (" b", "b"))):
        compiled = compile_grammar(GrammarJob("regex", pattern)._asdict(), OF_SPACES)
        for text in texts:
            for tokens in ([*text.encode()], [SPACES, *text.encode()], [*text.encode(), SPACES + 1]):
                (grammar,) = choices_of(compiled, 258, 1, group=None)
                assert grammar.validate_tokens(tokens) == validate(grammar_of(compiled, 258), tokens)
                assert grammar.num_processed_tokens == 0
                assert grammar.accept_tokens("request", grammar.validate_tokens(tokens)), "it is as it was"


def test_draft_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM validates them in the engine's loop, and again when it fills their masks."""
    compiled = compile_grammar(GrammarJob("regex", "[a-z]*")._asdict(), TOKENIZER)
    (grammar,) = choices_of(compiled, NUM_TOKENS, 1, group="req-5")
    now_s, accept = [0.0], xgrammar.GrammarMatcher.accept_token

    def accept_at_cost(matcher: Any, token: int) -> bool:
        now_s[0] += FREE_S / 2.5
        return accept(matcher, token)

    monkeypatch.setattr(token_cost, "time", SimpleNamespace(thread_time=lambda: now_s[0]))
    monkeypatch.setattr(xgrammar.GrammarMatcher, "accept_token", accept_at_cost)
    assert grammar.validate_tokens([ord("a")] * 8) == [ord("a")] * 3
    assert now_s[0] == pytest.approx(3 * FREE_S / 2.5), "no more of them are parsed"
    assert grammar.validate_tokens([ord("a")]) == []
    assert not grammar.accept_tokens("request", [ord("a")])


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


def typical(depth: int = 3) -> dict[str, Any]:
    """Return a schema as they are sent to extract records, nested."""
    properties: dict[str, Any] = {
        "id": {"type": "integer", "minimum": 0},
        "name": {"type": "string"},
        "email": {"type": "string", "format": "email"},
        "day": {"type": "string", "format": "date"},
        "zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "score": {"type": "number"},
        "kind": {"enum": ["first", "second", "third"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
    }
    if depth:
        properties["parts"] = {"type": "array", "items": typical(depth - 1)}
        properties["owner"] = typical(depth - 1)
    return {
        "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
    }  # fmt: skip


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name", "children"],
        }
    },
    "$ref": "#/$defs/node",
}
HONEST = {
    "any object": {"type": "object"},
    "records": typical(),
    "tree": TREE,
    "list of records": {"type": "array", "items": typical(0), "minItems": 1},
    "enum of 500": {"enum": [f"label number {number}" for number in range(500)]},
    "optional properties": {
        "type": "object",
        "properties": {f"f{n}": {"type": "string"} for n in range(100)},
    },
    "numbers": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    "identifiers": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,8}$"}},
    "counted words": {"type": "string", "pattern": "^([a-z]+ ){1,50}$"},
    "short text": {"type": "string", "pattern": "^.{1,50}$"},
    **{name: ALLOWED[name] for name in ("enum", "counted pattern", "alternatives")},
}
EXPRESSIONS = {
    "words": GrammarJob("regex", r"(\w+ )*\w+"),
    "lines": GrammarJob("regex", r"(- .*\n)+"),
    "date": GrammarJob("regex", r"\d{4}-\d{2}-\d{2}"),
    "sum": GrammarJob("ebnf", 'root ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" root ")"'),
    "select": GrammarJob(
        "ebnf",
        'root ::= "SELECT " name (", " name)* " FROM " name (" WHERE " name " = " value)?\n'
        'name ::= [a-z_]+\nvalue ::= "\'" [^\']* "\'" | [0-9]+',
    ),
    "choice": GrammarJob("ebnf", 'root ::= "yes" | "no" | "perhaps"'),
}
JOBS = {**{name: GrammarJob("json", json.dumps(each)) for name, each in HONEST.items()}, **EXPRESSIONS}


def allowed(mask: torch.Tensor) -> set[int]:
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
    return {*np.flatnonzero(bits).tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_the_walks_refuse_no_honest_grammar_with_150000_tokens(name: str) -> None:
    tokenizer = large_vocabulary()
    compiled = compile_grammar(JOBS[name]._asdict(), tokenizer)
    assert not exceeds_allowance(compiled, tokenizer.vocab_size, longest_runs(tokenizer.decoded_vocab))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALLOWED, *REFUSED])
def test_grammars_are_allowed_or_refused_by_their_cost_with_150000_tokens(name: str) -> None:
    tokenizer = large_vocabulary()
    assert tokenizer.vocab_size > 150_000
    schema = {**ALLOWED, **REFUSED}[name]
    compiled = compile_grammar(GrammarJob("json", json.dumps(schema))._asdict(), tokenizer)
    runs = longest_runs(tokenizer.decoded_vocab)
    assert exceeds_allowance(compiled, tokenizer.vocab_size, runs) == (name in REFUSED)


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
        began_s = time.process_time()
        for index, each in enumerate(choices):
            each.fill_bitmask(mask, index)
        assert time.process_time() - began_s < 2 * FREE_S, step
        for each in choices:
            each.accept_tokens("request", [ord("a")])
    assert not any(each.accept_tokens("request", [ord("a")]) for each in choices)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3])
def test_a_step_does_not_wait_for_a_mask_that_no_walk_meets(engine: Engine, number: int) -> None:
    """It takes seconds in one call of xgrammar, behind a beginning that an answer seldom has."""
    tokenizer = large_vocabulary()
    engine.num_tokens = tokenizer.vocab_size
    parts = "|".join(f".{{1,{500 + each}}}{each}" for each in range(10))
    job = GrammarJob("json", json.dumps({"type": "string", "pattern": f"^([^#]*|#({parts}))$"}))
    compiled = compile_grammar(job._asdict(), tokenizer)
    assert not exceeds_allowance(compiled, tokenizer.vocab_size, longest_runs(tokenizer.decoded_vocab))
    names = [f"req-{each}" for each in range(number + 1)]
    grammars = {name: choices_of(compiled, tokenizer.vocab_size, 1, group=name)[0] for name in names}
    assert engine.step(grammars, ord('"')) == []
    for name in names[1:]:
        assert grammars[name].accept_tokens("request", [ord("#")])
    assert engine.step(grammars, ord("a")) == names[1:]
    assert engine.step({names[0]: grammars[names[0]]}, ord("a")) == [], "another request has its masks"
    for name in names[1:]:
        mask = token_cost._mask_of(grammars[name])
        assert mask is not None
        assert mask.is_left
        grammars[name].rollback(1)  # the matcher is a thread's: it stays as it is
        assert not grammars[name].accept_tokens("request", [ord("a")])
