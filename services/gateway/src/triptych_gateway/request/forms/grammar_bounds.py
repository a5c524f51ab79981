"""Bounds on structured outputs: the content of a caller's schema, regular expression or grammar.

prefill_decode compiles it in a process that can be ended. Here the kinds that are known to take minutes, or
to end such a process, are refused before they cost anything; each text and each value is read once.

    response_format, structured_outputs, tools, text.format, output_config --> schemas, patterns, grammars
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from triptych_common.domain.errors import RequestError

CODE = "grammar_too_complex"
MAX_SCHEMA_DEPTH = 64  # vLLM's, of objects and lists
MAX_PATTERN_DEPTH = 64  # of parentheses
REPEATED = frozenset(
    {
        "maxItems",
        "minItems",
        "maxLength",
        "minLength",
        "maxProperties",
        "minProperties",
        "maxContains",
        "minContains",
    }
)
ENGINE_FIELD = "structured_outputs"
ALTERNATIVES = frozenset({"enum", "anyOf", "oneOf", "allOf"})

_SIGN = re.compile(r"\\.|[\[\]()|*+?]|\{(\d*+)(?:,(\d*+))?\}", re.DOTALL)
_QUOTED = re.compile(r'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"?|#[^\n]*+')  # a grammar's strings and comments
_ENGINE_NAME = re.compile(r"structured_outputs(?:\.[a-z_]++)?")
_MAX_DIGITS = 9
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GrammarBounds:
    """Bounds of one schema, regular expression or grammar."""

    max_chars: int = 64 << 10
    max_repeats: int = 1_000_000
    """Largest size with all repetitions written out: nested ones multiply."""
    max_alternatives: int = 10_000


def check_grammars(fields: Fields, bounds: GrammarBounds) -> None:
    """Check everything in a request's body that vLLM would make a grammar of.

    Raises:
        RequestError: 400, `param` names the field.
    """
    for path, kind, value in _grammars(fields):
        if value is None:
            continue
        check = _GrammarCheck(path, bounds)
        if kind == "json":
            check.read_schema(value)
        elif kind == "choice":
            check.read_choice(value)
        elif isinstance(value, str):  # else vLLM refuses its type
            check.read_text(value, is_grammar=kind == "grammar")


def named_as_sent(error: RequestError, fields: Fields) -> RequestError:
    """Return an instance's error, which names the grammar as the caller has sent it.

    vLLM puts every grammar into `structured_outputs`, which its error names.
    """
    if error.param is None or error.param.partition(".")[0] != ENGINE_FIELD:
        return error
    sent = next((path for path, _, value in _grammars(fields) if value and not _is_text(value)), ENGINE_FIELD)
    if sent.startswith(ENGINE_FIELD):
        return RequestError(error.status_code, error.code, error.message, sent)
    if "json_schema" in _object(fields.get(sent)):
        sent += ".json_schema"
    message = _ENGINE_NAME.sub(lambda _: sent, error.message, count=1)
    return RequestError(error.status_code, error.code, message, sent)


def _grammars(fields: Fields) -> Iterator[tuple[str, str, Any]]:
    """Yield place, kind and value of each; vLLM checks values of a wrong type."""
    structured = _object(fields.get("structured_outputs"))
    for name, kind in _STRUCTURED.items():
        yield f"structured_outputs.{name}", kind, structured.get(name)
    yield "response_format", "json", _object(fields.get("response_format")) or None
    yield "text.format", "json", _object(_object(fields.get("text")).get("format")) or None
    yield "output_config.format", "json", _object(_object(fields.get("output_config")).get("format")) or None
    tools = fields.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict):
            continue
        function = _object(tool.get("function"))
        yield f"tools[{index}].function.parameters", "json", function.get("parameters")
        yield f"tools[{index}].parameters", "json", tool.get("parameters")
        yield f"tools[{index}].input_schema", "json", tool.get("input_schema")
        yield f"tools[{index}].format", "json", _object(tool.get("format")) or None


_STRUCTURED = {
    "json": "json", "regex": "regex", "choice": "choice", "grammar": "grammar", "structural_tag": "json",
}  # fmt: skip


def _is_text(form: Any) -> bool:
    """Return whether `form` asks for an answer without a grammar."""
    return isinstance(form, dict) and form.get("type") == "text"


def _object(value: Any) -> Fields:
    return value if isinstance(value, dict) else {}


class _GrammarCheck:
    """Counts of one field's grammar, checked as it is read."""

    def __init__(self, path: str, bounds: GrammarBounds) -> None:
        self._path, self._bounds = path, bounds
        self._num_chars = self._num_alternatives = 0

    def read_schema(self, schema: Any) -> None:
        """Read a JSON schema, an object with some in it, or the JSON text of either."""
        if isinstance(schema, str):
            self._add_chars(len(schema))
            try:
                schema = orjson.loads(schema)
            except orjson.JSONDecodeError as error:
                raise RequestError(400, "invalid_value", f"{self._path} is not JSON", self._path) from error
            self._num_chars = 0
        waiting: list[tuple[Any, int, int]] = [(schema, 1, 1)]  # value, depth, repetitions around it
        while waiting:
            value, depth, repeats = waiting.pop()
            if isinstance(value, str):
                self._add_chars(len(value) + 2)
                continue
            self._add_chars(1)
            if not isinstance(value, dict | list):
                continue
            if depth > MAX_SCHEMA_DEPTH + _WRAPPERS:
                raise self._too_complex(f"is nested more than {MAX_SCHEMA_DEPTH} deep")
            if isinstance(value, list):
                waiting += [(each, depth + 1, repeats) for each in value]
                continue
            repeats = self._repeated(value, repeats)
            for name, each in value.items():
                self._add_chars(len(name) + 2)
                self._read_keyword(name, each, repeats)
                waiting.append((each, depth + 1, repeats))

    def _read_keyword(self, name: str, value: Any, repeats: int) -> None:
        if name in ALTERNATIVES and isinstance(value, list):
            self._add_alternatives(len(value))
        elif name == "pattern" and isinstance(value, str):
            self._read_pattern(value, repeats)
        elif name == "patternProperties" and isinstance(value, dict):
            for pattern in value:
                self._read_pattern(pattern, repeats)
        elif name in ("grammar", "definition") and isinstance(value, str):  # of a structural tag, of a tool
            self._read_pattern(_QUOTED.sub("x", value), repeats)

    def _repeated(self, schema: Fields, repeats: int) -> int:
        most = max((schema[name] for name in REPEATED & schema.keys() if _is_number(schema[name])), default=1)
        return self._check_repeats(repeats * max(int(min(most, 1 << 32)), 1))

    def read_choice(self, choice: Any) -> None:
        if isinstance(choice, list):
            self._add_alternatives(len(choice))
            self._add_chars(sum(len(each) + 2 for each in choice if isinstance(each, str)))

    def read_text(self, text: str, *, is_grammar: bool) -> None:
        """Read a regular expression, or a grammar in EBNF or Lark."""
        self._add_chars(len(text))
        self._read_pattern(_QUOTED.sub("x", text) if is_grammar else text, 1)

    def _read_pattern(self, pattern: str, repeats: int) -> None:
        """Read a pattern whose match may be repeated `repeats` times."""
        # Of each open group: its size, and that of its last part, which a `{n,m}` behind it repeats.
        sizes, lasts = [0], [0]
        end, is_in_class = 0, False
        for sign in _SIGN.finditer(pattern):
            text, gap = sign[0], sign.start() - end
            end = sign.end()
            if is_in_class:
                is_in_class = text != "]"
                continue
            if gap:
                sizes[-1] += gap
                lasts[-1] = 1
            if text == "(":
                sizes.append(0)
                lasts.append(0)
                if len(sizes) > MAX_PATTERN_DEPTH:
                    raise self._too_complex(f"has parentheses nested more than {MAX_PATTERN_DEPTH} deep")
            elif text == ")":
                if len(sizes) > 1:
                    lasts.pop()
                    lasts[-1] = sizes.pop()
                    sizes[-1] += lasts[-1]
            elif text[0] == "{":
                times = max(_number(sign[1]), _number(sign[2]), 1)
                sizes[-1] += lasts[-1] * (times - 1)
                lasts[-1] *= times
            elif text == "|":
                self._add_alternatives(1)
            elif text not in "*+?]":  # a class, or a character behind a backslash
                is_in_class = text == "["
                sizes[-1] += 1
                lasts[-1] = 1
            self._check_repeats(repeats * sizes[-1])

    # ---- bounds ------------------------------------------------------------------------------------
    def _add_chars(self, number: int) -> None:
        self._num_chars += number
        if self._num_chars > self._bounds.max_chars:
            raise self._too_complex(f"is longer than {self._bounds.max_chars} characters")

    def _add_alternatives(self, number: int) -> None:
        self._num_alternatives += number
        if self._num_alternatives > self._bounds.max_alternatives:
            raise self._too_complex(f"has more than {self._bounds.max_alternatives} alternatives")

    def _check_repeats(self, repeats: int) -> int:
        if repeats > self._bounds.max_repeats:
            raise self._too_complex(f"repeats its parts more than {self._bounds.max_repeats} times")
        return repeats

    def _too_complex(self, why: str) -> RequestError:
        return RequestError(400, CODE, f"{self._path} {why}", self._path)


_WRAPPERS = 16  # objects around a schema in a field: vLLM's `STRUCTURAL_TAG_WRAPPER_NESTING`


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value


def _number(digits: str | None) -> int:
    if not digits:
        return 0
    return int(digits) if len(digits) <= _MAX_DIGITS else 10**_MAX_DIGITS
