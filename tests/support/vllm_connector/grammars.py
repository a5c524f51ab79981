"""Tokenizers for xgrammar, and grammars of callers for them."""

import base64
import functools
import importlib.resources
import json
import warnings

from triptych_vllm_connector.grammars.grammar_job import GrammarJob

with warnings.catch_warnings(action="ignore"):  # importing torch warns
    import transformers  # noqa: F401  -- xgrammar cannot be imported first
    import xgrammar

NUM_TOKENS = 257
TOKENIZER = xgrammar.TokenizerInfo(
    [*(bytes([byte]) for byte in range(256)), b"<eos>"],
    vocab_type=xgrammar.VocabType.RAW,
    vocab_size=NUM_TOKENS,
    stop_token_ids=[256],
)


def large_vocabulary() -> xgrammar.TokenizerInfo:
    """The 150,000 tokens of byte-level BPE that mistral_common, which vLLM needs, has in its package."""
    return vocabulary(150_000)


@functools.cache
def vocabulary(num_tokens: int) -> xgrammar.TokenizerInfo:
    """Return the first of them, the bytes and those that most texts have, and one that ends the answer."""
    file = importlib.resources.files("mistral_common") / "data" / "tekken_240911.json"
    entries = json.loads(file.read_text())["vocab"][:num_tokens]
    tokens = [base64.b64decode(each["token_bytes"]) for each in entries]
    return xgrammar.TokenizerInfo(
        [*tokens, b"<eos>"],
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=len(tokens) + 1,
        stop_token_ids=[len(tokens)],
    )


NESTED = "(" * 50_000 + "a" + ")" * 50_000
"""A regular expression that ends a process."""
OBJECT = GrammarJob("json", '{"type": "object"}')
TAG = {"type": "structural_tag", "format": {"type": "regex", "pattern": "a+"}}
OF_EACH_KIND = (
    (GrammarJob("json", '{"type": "integer"}'), "12", "x"),
    (
        GrammarJob("json", '{"type": "array", "items": {"type": "null"}}', is_compact=True),
        "[null]",
        "[ null]",
    ),
    (GrammarJob("regex", "[0-9]{2}"), "42", "4x"),
    (GrammarJob("ebnf", 'root ::= "yes" | "no"'), "yes", "maybe"),
    (GrammarJob("lark", 'start: "yes" | "no"'), "no", "maybe"),
    (GrammarJob("structural_tag", json.dumps(TAG)), "aa", "b"),
)
"""With a text that each accepts, and one that it does not."""


def schema(num_properties: int) -> GrammarJob:
    """An object whose properties are all optional: its compile time is quadratic in their number."""
    properties = {f"field_{number}": {"type": "string"} for number in range(num_properties)}
    return GrammarJob("json", json.dumps({"type": "object", "properties": properties}))


def accepts(compiled: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.is_completed()
