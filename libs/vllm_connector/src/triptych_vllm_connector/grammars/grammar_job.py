"""One grammar to compile, as the compile server takes it, made of vLLM's parameters of a request."""

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self, TypeVar

GrammarKind = Literal["json", "regex", "lark", "ebnf", "structural_tag"]
Tokenizer = TypeVar("Tokenizer")


def tokenizer_of(kind: str, tokenizers: Sequence[Tokenizer]) -> Tokenizer:
    """Tokenizer for grammars of `kind`: the second of two for those that may name special tokens.

    vLLM 0.33 has two; `seam.tokenizer_infos` returns them in this order.
    """
    return tokenizers[-1] if kind in ("lark", "structural_tag") else tokenizers[0]


class GrammarJob(NamedTuple):
    """Host -> compile server: what to compile. Equal jobs compile to the same grammar."""

    kind: GrammarKind
    text: str
    is_compact: bool = False  # JSON without white space (vLLM's `disable_any_whitespace`)

    @classmethod
    def try_from_params(cls, params: Any, *, is_compact: bool) -> Self | None:
        """The job of vLLM's `StructuredOutputsParams`; None for `json_object`, which is the same for all.

        Raises:
            VLLMValidationError: JSON that is nested too deeply.
            TypeError, ValueError: a value that cannot be a grammar.
        """
        from vllm.sampling_params import check_json_nesting
        from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

        if params.json is not None:
            check_json_nesting(params.json)
            return cls("json", _text_of(params.json), is_compact)
        if params.regex is not None:
            return cls("regex", params.regex)
        if params.choice is not None:
            return cls("ebnf", choice_as_grammar(params.choice))
        if params.grammar is not None:
            return cls("lark" if grammar_is_likely_lark(params.grammar) else "ebnf", params.grammar)
        if params.structural_tag is not None:
            check_json_nesting(params.structural_tag, structural_tag=True)
            return cls("structural_tag", params.structural_tag)
        return None


def _text_of(schema: Any) -> str:
    """Text of a schema, as vLLM's `get_structured_output_key` writes it."""
    return schema if isinstance(schema, str) else json.dumps(schema)
