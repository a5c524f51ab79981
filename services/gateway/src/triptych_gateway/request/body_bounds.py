"""Bounds on a body: on its JSON text before anything parses it, then on each field and on the cost of all.

A parser makes one Python object per value and holds the interpreter's lock meanwhile, so a body of empty
lists costs a gigabyte and stops the event loop for seconds. Counting costs next to nothing: media, the
bulk of a large body, are stepped over, and the scan ends where a bound is passed.

    body = media (long `"data:…"` strings, and those of `"data"`) + prompt (everything else)

For text that is no JSON the counts are right up to its first fault, where the parser stops.

vLLM takes each of the bounded fields from any caller, and lets one request end, fill or falsify what others
share: see the table in docs/operations/security.md.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_gateway.endpoints.answer_cost import AnswerCost
from triptych_gateway.endpoints.endpoint import Endpoint, Schema
from triptych_gateway.settings import RequestSettings

MAX_DEPTH = 253  # of objects and lists; orjson writes no more

# As `data_url` takes it, in any case; or the value of `input_audio`, as JSON's writers write it.
_MEDIA_START = re.compile(rb'"[dD][aA][tT][aA]:|(?<="data":)"|(?<="data": )"')
_MEDIA_START_BYTES = 6
STEP = 64 << 10  # bytes that are copied at once
MIN_MEDIA_BYTES = 4096  # shorter strings are scanned like any other text

_TOKEN = re.compile(
    rb"""
      (?P<string> " [^"\\]*+ (?: \\. [^"\\]*+ )*+ "? )
    | (?P<empty>  \[[ \t\r\n]*+\] | \{[ \t\r\n]*+\} )
    | (?P<open>   [\[{] )
    | (?P<close>  [\]}] )
    | ,
    """,
    re.VERBOSE | re.DOTALL,
)
_STRING, _EMPTY, _OPEN, _CLOSE = (_TOKEN.groupindex[name] for name in ("string", "empty", "open", "close"))


def check_bounds(raw: bytes | bytearray, bounds: RequestSettings) -> None:
    """Refuse a body that would cost too much to parse, here or in prefill_decode.

    Raises:
        RequestError: 413 too much text beside the media; 400 too many values, or nested too deeply.
    """
    spans = list(_prompt_spans(raw, bounds))
    count_values(raw, bounds.max_body_values, spans)


def count_values(
    raw: bytes | bytearray, max_values: int, spans: list[tuple[int, int]] | None = None
) -> int | None:
    """Return the number of values in a JSON text; None if it is too short to pass a bound.

    Raises:
        RequestError: 400 more than `max_values`, or nested more than `MAX_DEPTH` deep.
    """
    spans = [(0, len(raw))] if spans is None else spans
    num_opened = _count(raw, b"[", spans) + _count(raw, b"{", spans)
    if num_opened <= MAX_DEPTH and num_opened + _count(raw, b",", spans) < max_values:
        return None  # as most bodies: those signs are in its texts, too, and still few enough
    num_values, num_strings, num_empty, depth = 1, 0, 0, 0
    for start, end in spans:
        for token in _TOKEN.finditer(raw, start, end):
            kind = token.lastindex
            if kind == _STRING:
                num_strings += 1
                if num_strings > 2 * max_values:  # key and value; reached by faulty text only
                    raise too_complex(max_values)
                continue
            if kind == _CLOSE:
                depth -= 1
                if depth < 0:
                    return num_values  # no JSON: the parser stops here as well
                continue
            if kind == _EMPTY:
                num_empty += 1  # a value that its parent's sign has counted, except in faulty text
                if num_empty > max_values or depth + 1 > MAX_DEPTH:
                    raise too_complex(max_values)
                continue
            if kind == _OPEN:
                depth += 1
            num_values += 1  # the first child of a list or object, or the one after a comma
            if num_values > max_values or depth > MAX_DEPTH:
                raise too_complex(max_values)
    return num_values


def _count(raw: bytes | bytearray, sign: bytes, spans: list[tuple[int, int]]) -> int:
    return sum(raw.count(sign, start, end) for start, end in spans)


def _prompt_spans(raw: bytes | bytearray, bounds: RequestSettings) -> Iterator[tuple[int, int]]:
    """Yield start and end of the text between the media; at most `max_prompt_bytes` together.

    Behind more short strings that begin like media than a body may have strings, the rest is prompt.

    Raises:
        RequestError: 413 there is more.
    """
    position, left = 0, bounds.max_prompt_bytes
    search_from, num_other = 0, 0
    while num_other <= 2 * bounds.max_body_values:  # key and value
        # No further than the bound: what lies beyond is not searched.
        found = _MEDIA_START.search(raw, search_from, position + left + _MEDIA_START_BYTES)
        if found is None:
            break
        start = found.start()
        end = _media_end(raw, start)
        if end is None:
            search_from = found.end()
            num_other += 1
            continue
        yield position, start
        left -= start - position
        position = search_from = end
    if len(raw) - position > left:
        raise prompt_too_large(bounds.max_prompt_bytes)
    yield position, len(raw)


def _media_end(raw: bytes | bytearray, start: int) -> int | None:
    """Return the end of the media string that opens at `start`, behind its quote; None for other text.

    A quote with a backslash before it lies inside a string, and media hold no such quote.
    """
    end = raw.find(b'"', start + 1)
    if end - start < MIN_MEDIA_BYTES or raw[end - 1 : end] == b"\\" or raw[start - 1 : start] == b"\\":
        return None
    # A character beyond ASCII makes Python store the whole string with up to four bytes for each.
    is_ascii = all(raw[at : min(at + STEP, end)].isascii() for at in range(start, end, STEP))
    return end + 1 if is_ascii else None


def prompt_too_large(max_prompt_bytes: int) -> RequestError:
    message = f"the body without its media is larger than {max_prompt_bytes} bytes"
    return RequestError(413, "prompt_too_large", message)


def too_complex(max_values: int) -> RequestError:
    message = f"the body has more than {max_values} values, or is nested more than {MAX_DEPTH} deep"
    return RequestError(400, "body_too_complex", message)


MAX_SHOWN_CHARS = 100  # of a key, in an error


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "null": ("null", lambda value: value is None),
    "boolean": ("a boolean", lambda value: isinstance(value, bool)),
    "integer": ("a whole number", lambda value: _is_number(value) and value == value // 1),
    "number": ("a number", _is_number),
    "string": ("a string", lambda value: isinstance(value, str)),
    "array": ("a list", lambda value: isinstance(value, list)),
    "object": ("an object", lambda value: isinstance(value, dict)),
}


def check_shape(value: Any, schema: Schema, path: str) -> None:
    """Check that `value` and all within it have the types and numbers of `schema`.

    The checks know JSON Schema's `type`, `enum`, `properties`, `required`, `additionalProperties`,
    `propertyNames`, `items`, `maxItems`, `maxLength`, `maxProperties`, and `oneOf` beside a `discriminator`;
    other keywords describe, and are vLLM's to check.

    Raises:
        RequestError: 400, `param` names the first faulty place.
    """
    kinds = schema.get("type")
    if kinds is not None:
        names = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        if not any(_KINDS[name][1](value) for name in names):
            wanted = " or ".join(_KINDS[name][0] for name in names if name != "null" or len(names) == 1)
            raise RequestError(400, "invalid_type", f"{path} must be {wanted}", path)
    if "enum" in schema and value not in schema["enum"]:
        wanted = ", ".join(str(each) for each in schema["enum"] if each is not None)
        raise RequestError(400, "invalid_value", f"{path} must be one of {wanted}", path)
    if isinstance(value, str):
        _check_number(len(value), schema.get("maxLength"), "characters", path)
    elif isinstance(value, list):
        _check_number(len(value), schema.get("maxItems"), "items", path)
        items = schema.get("items")
        if items is not None:
            for index, each in enumerate(value):
                check_shape(each, items, f"{path}[{index}]")
    elif isinstance(value, dict):
        _check_object(value, schema, path)


def _check_object(value: dict[str, Any], schema: Schema, path: str) -> None:
    if "discriminator" in schema:
        schema = _kind_of(value, schema)
    _check_number(len(value), schema.get("maxProperties"), "entries", path)
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name in schema.get("required", ()):
        if name not in value:
            raise RequestError(400, "missing_field", f"{path}.{name} is missing", f"{path}.{name}")
    max_chars = schema.get("propertyNames", {}).get("maxLength")
    for name, each in value.items():
        place = f"{path}.{name[:MAX_SHOWN_CHARS]}"
        if max_chars is not None and len(name) > max_chars:
            message = f"{path} has a key of {len(name)} characters; {max_chars} at most"
            raise RequestError(400, "invalid_value", message, path)
        if name in properties:
            check_shape(each, properties[name], place)
        elif others is not None:
            check_shape(each, others, place)


def _kind_of(value: dict[str, Any], schema: Schema) -> Schema:
    """Return the member of `oneOf` that `value` names; without a name the first kind.

    The form of the body refuses unknown names: nothing is checked here then.
    """
    name = schema["discriminator"]["propertyName"]
    for kind in schema["oneOf"]:
        if name not in value or value[name] in kind["properties"][name]["enum"]:
            member: Schema = kind
            return member
    return {}


def _check_number(number: int, bound: int | None, of: str, path: str) -> None:
    if bound is not None and number > bound:
        raise RequestError(400, "invalid_value", f"{path} has {number} {of}; {bound} at most", path)


TEMPLATE_FIELD = "chat_template_kwargs"
# Parameters of transformers' `apply_chat_template` and of the tokenizers and processors that it calls, and of
# vLLM's own: `{"padding": "max_length", "max_length": 10**8}` fills a host's memory with 182 bytes.
# tests/unit/prefill_decode/test_body_shapes.py derives them from the signatures.
TEMPLATE_PARAMETERS = frozenset(
    """
    add_generation_prompt add_special_tokens audio_kwargs chat_template common_kwargs continue_final_message
    conversation documents images_kwargs is_split_into_words kwargs load_audio_from_video max_length messages
    model_config pad_to_multiple_of padding padding_side processor_kwargs return_assistant_tokens_mask
    return_attention_mask return_dict return_length return_mm_token_type_ids return_offsets_mapping
    return_overflowing_tokens return_special_tokens_mask return_tensors return_text_replacement_offsets
    return_token_type_ids self stride text text_kwargs text_pair text_pair_target text_target tokenize
    tokenizer tokenizer_kwargs tools truncation verbose video_load_backend videos_kwargs
    """.split()  # noqa: SIM905 -- a line for each would be a page
)
# A field that makes vLLM's V1 sampler give other requests of the batch wrong log probabilities.
MIXING_FIELDS = ("logprob_token_ids",)


def check_fields(
    fields: Mapping[str, Any], endpoint: Endpoint, limits: RequestSettings, num_prompt_bytes: int
) -> None:
    """Check a parsed body, but for its inputs, which have checks of their own.

    Raises:
        RequestError: 400, `param` names the field.
    """
    for name in MIXING_FIELDS:
        if fields.get(name) is not None:
            message = f"{name} is not served: it changes the log probabilities of other requests"
            raise RequestError(400, "unsupported", message, name)
    for name, schema in endpoint.passed_fields.items():
        if name in fields:
            check_shape(fields[name], schema, name)
    for name in fields.get(TEMPLATE_FIELD) or ():
        if name in TEMPLATE_PARAMETERS:
            path = f"{TEMPLATE_FIELD}.{name[:MAX_SHOWN_CHARS]}"
            raise RequestError(400, "field_not_allowed", f"{path} may not be set by callers", path)
    cost = AnswerCost.of(fields, num_prompt_bytes)
    if cost.num_choices > 1 and cost.num_answer_tokens > limits.max_answer_tokens:
        message = (
            f"{cost.count_field} asks for {cost.num_choices} answers of up to {cost.tokens_each} tokens"
            f" ({limits.max_answer_tokens} together at most): name fewer, or a smaller max_tokens"
        )
        raise RequestError(400, "invalid_value", message, cost.count_field)
    if cost.num_logprobs > limits.max_logprobs:
        message = (
            f"{cost.logprobs_field} asks for about {cost.num_logprobs} log probabilities"
            f" ({limits.max_logprobs} at most)"
        )
        raise RequestError(400, "invalid_value", message, cost.logprobs_field)
