"""Hostile values for every field of every endpoint, at every place that its schema names. Seeded.

    endpoint -> places (fields, and what stands inside them) -> a request with a hostile value at one place

The rest of the body is as its schema has it, so that the value gets as far as it can. Bodies are written as
text: a value may be nested 100,000 deep.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from triptych_gateway.endpoints.endpoint import BodyForm, Endpoint, Schema
from triptych_gateway.endpoints.table import ENDPOINTS
from triptych_gateway.request.body_bounds import MIXING_FIELDS
from triptych_gateway.request.chat_request import REFUSED_FIELDS, STRIPPED_FIELDS

MAX_DEPTH = 100_000
MAX_BYTES = (4 << 20) + 1000  # of one value: a little more than `max_prompt_bytes`
MAX_NUMBER_DIGITS = 5000
MAX_PLACE_DEPTH = 6
BOUNDARY = "hostile-boundary"
Place = tuple[str | int, ...]

_USER = {"role": "user", "content": "read the digits"}
_BASES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": [_USER], "max_tokens": 4},
    "/v1/chat/completions/batch": {"messages": [[_USER]], "max_tokens": 4},
    "/v1/completions": {"prompt": "read the digits", "max_tokens": 4},
    "/v1/responses": {"input": "read the digits", "max_output_tokens": 4},
    "/v1/messages": {"messages": [_USER], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [_USER]},
    "/tokenize": {"prompt": "read the digits"},
    "/detokenize": {"tokens": [5, 6]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/score": {"queries": "a", "documents": ["b"]},
    "/v1/score": {"queries": "a", "documents": ["b"]},
}
# What has been slow somewhere: expressions of vLLM's, of ours, of xgrammar's; the tokenizer; the template.
_TEXTS = (
    "a", " ", "1/", "(", "((a|b)*", "[", "{", '{"a":', "input_value={'error': {", "\\", "\x00", "é",
    "\U0001f600", "\ud800", "\n", "0", "9" * 40, "x{1,200}", "(a|", "<|image_pad|>", "<tool_call>", "data:",
    "data:image/png;base64,AAAA", "http://a/", "A" * 64 + " ", "{{", "{% for a in b %}", "\u202e", "a.",
    "/../", "root ::= root ", "'", '"', "%00",
)  # fmt: skip
_NUMBERS = (
    "0", "-0", "-1", "1", "2", "127", "128", "129", "1000", "1e3", "0.5", "-0.5", "1e308", "-1e308", "1e400",
    "2147483648", "9223372036854775808", "-9223372036854775809", "1E+2", "NaN", "Infinity", "true",
    "false", "null",
)  # fmt: skip
_ELEMENTS = (
    "0",
    '""',
    "{}",
    "[]",
    "null",
    "true",
    '{"type":"text"}',
    '{"type":5}',
    '"a"',
    "[[]]",
    '{"a":{"b":[]}}',
)
_KEYS = ("a", "type", "content", "anyOf", "properties", "$ref", "name", "text", "items", "__class__")


@dataclass(frozen=True)
class Target:
    """One place of one endpoint."""

    endpoint: Endpoint
    method: str
    place: Place  # (): the body itself; otherwise its field first
    schema: Schema
    where: str = "body"  # or: form, query, path

    @property
    def name(self) -> str:
        shown = ".".join(map(str, self.place))
        return f"{self.method} {self.endpoint.path} {self.where} {shown}".rstrip()

    @property
    def field(self) -> tuple[str, str, str | int]:
        """Endpoint and field, whatever stands inside."""
        return self.method + self.endpoint.path, self.where, self.place[0] if self.place else ""


@dataclass(frozen=True)
class HostileRequest:
    """One request to send."""

    target: Target
    path: str
    content_type: str
    body: bytes
    value: str  # how the value was made, for a report


def targets() -> list[Target]:
    """Return every place of every endpoint."""
    found: list[Target] = []
    for endpoint in ENDPOINTS:
        for method in endpoint.methods:
            found += _targets_of(endpoint, method)
    return found


def _targets_of(endpoint: Endpoint, method: str) -> Iterator[Target]:
    for name, schema in endpoint.query.items():
        yield Target(endpoint, method, (name,), schema, "query")
    for name in endpoint.parameters:
        yield Target(endpoint, method, (name,), {"type": "string"}, "path")
    where = {BodyForm.JSON: "body", BodyForm.FORM: "form", BodyForm.NONE: "body"}[endpoint.form]
    yield Target(endpoint, method, (), {}, where)
    if endpoint.form is BodyForm.NONE:
        return
    schemas: dict[str, Schema] = {each: {} for each in ("model", "no_such_field", *endpoint.inputs)}
    if endpoint.form is BodyForm.JSON:
        read = () if endpoint.body is None else endpoint.body.model_fields
        names = (*endpoint.refused_fields, *REFUSED_FIELDS, *STRIPPED_FIELDS, *MIXING_FIELDS, *read)
        schemas |= {each: {} for each in names}
    schemas |= endpoint.passed_fields
    for name, schema in schemas.items():
        for place, inner in _places((name,), schema):
            yield Target(endpoint, method, place, inner, where)


def _places(place: Place, schema: Schema) -> Iterator[tuple[Place, Schema]]:
    yield place, schema
    if len(place) >= MAX_PLACE_DEPTH:
        return
    for member in (*schema.get("oneOf", ()), *schema.get("anyOf", ())):
        for name, inner in member.get("properties", {}).items():
            yield from _places((*place, name), inner)
        if "items" in member:
            yield from _places((*place, 0), member["items"])
    for name, inner in schema.get("properties", {}).items():
        yield from _places((*place, name), inner)
    if isinstance(schema.get("additionalProperties"), Mapping):
        yield from _places((*place, "a"), schema["additionalProperties"])
    if "items" in schema:
        yield from _places((*place, 0), schema["items"])


class HostileRequests:
    """Requests with a hostile value each."""

    def __init__(self, seed: int, model: str, max_bytes: int = MAX_BYTES) -> None:
        self._rng, self._model, self._max_bytes = random.Random(seed), model, max_bytes

    def shuffled(self, places: list[Target]) -> list[Target]:
        """Return `places` in a random order."""
        return self._rng.sample(places, len(places))

    def request(self, target: Target) -> HostileRequest:
        """Return a request whose value at `target` is hostile."""
        kind, text = self._value(target.schema)
        path = target.endpoint.shown_path
        content_type, body = "application/json", b""
        parameters = dict.fromkeys(target.endpoint.parameters, "a")
        if target.where == "path":
            parameters[str(target.place[0])] = _in_url(text)
        for name, value in parameters.items():
            path = path.replace(f"{{{name}}}", value)
        if target.where == "query":
            path += f"?{target.place[0]}={_in_url(text)}"
        elif target.where == "form":
            content_type = f"multipart/form-data; boundary={BOUNDARY}"
            body = _form(target, self._model, text)
        elif target.where == "body":
            body = self._body(target, text)
        return HostileRequest(target, path, content_type, body, kind)

    # ---- the body ----------------------------------------------------------------------------------
    def _body(self, target: Target, text: str) -> bytes:
        endpoint = target.endpoint
        if not target.place:
            return _encoded(text)
        base = {"model": self._model, **_BASES.get(endpoint.path, {"input": "a"})}
        if endpoint.streams and self._rng.random() < 0.3:
            base["stream"] = True
        name = str(target.place[0])
        fields = {key: orjson.dumps(each).decode() for key, each in base.items() if key != name}
        schema = endpoint.passed_fields.get(name, {})
        fields[name] = self._around(target.place[1:], schema, text)
        return _encoded(_object(fields))

    def _around(self, place: Place, schema: Schema, text: str) -> str:
        """`text` at `place` of a value that is else as `schema` has it."""
        if not place:
            return text
        step = place[0]
        if isinstance(step, int):
            member = _member(schema, lambda each: "items" in each)
            inner = self._around(place[1:], member.get("items", {}), text)
            room = max(self._max_bytes // (len(inner) + 1), 1)
            number = 1 if self._rng.random() < 0.7 else self._size(min(room, 60_000))
            return "[" + ",".join([inner] * number) + "]"
        member = _member(schema, lambda each: step in each.get("properties", {}))
        properties = member.get("properties", {})
        named = (*member.get("required", ()), *(["type"] if "enum" in properties.get("type", {}) else []))
        fields = {name: _sample(properties.get(name, {})) for name in named if name != step}
        inner_schema = properties.get(step, member.get("additionalProperties") or {})
        fields[step] = self._around(place[1:], inner_schema, text)
        return _object(fields)

    # ---- values ------------------------------------------------------------------------------------
    def _size(self, most: int) -> int:
        """1 to `most`, each order of magnitude as often as any other."""
        return min(most, int(math.exp(self._rng.uniform(0, math.log(most + 1)))) or 1)

    def _value(self, schema: Schema) -> tuple[str, str]:
        """Return how the value was made, and its text; much of it is not valid JSON."""
        makers: list[Callable[[Schema], tuple[str, str]]] = [
            self._text, self._text, self._nested, self._nested, self._list, self._list, self._entries,
            self._number, self._at_bound, self._as_schema,
        ]  # fmt: skip
        return self._rng.choice(makers)(schema)

    def _text(self, _: Schema) -> tuple[str, str]:
        piece, size = self._rng.choice(_TEXTS), self._size(self._max_bytes)
        written = orjson.dumps(piece).decode()[1:-1] if piece != "\ud800" else "\\ud800"
        return f"text {piece[:20]!r} of {size} B", '"' + written * max(size // len(written.encode()), 1) + '"'

    def _nested(self, _: Schema) -> tuple[str, str]:
        depth, key = self._size(MAX_DEPTH), self._rng.choice(_KEYS)
        opening, closing = self._rng.choice(
            [("[", "]"), (f'{{"{key}":', "}"), (f'[{{"{key}":', "}]"), (f'{{"{key}":[', "]}"), ("[0,", "]")]
        )
        text = opening * depth + self._rng.choice(_ELEMENTS) + closing * self._rng.choice([depth, depth, 0])
        if self._rng.random() < 0.2:  # JSON in a text, as arguments of calls have it
            text = orjson.dumps(text[: self._max_bytes // 2]).decode()
        return f"{opening!r} nested {depth} deep", text

    def _list(self, schema: Schema) -> tuple[str, str]:
        element = self._rng.choice([*_ELEMENTS, _sample(schema.get("items", {}))])
        number = self._size(self._max_bytes // (len(element) + 1))
        return f"list of {number} × {element[:30]}", "[" + ",".join([element] * number) + "]"

    def _entries(self, _: Schema) -> tuple[str, str]:
        element = self._rng.choice(_ELEMENTS)
        number = self._size(self._max_bytes // (len(element) + 12))
        prefix = self._rng.choice(_KEYS) if self._rng.random() < 0.7 else "k" * self._size(1000)
        number = min(number, self._max_bytes // (len(prefix) + 10) + 1)
        entries = ",".join(
            f'"{prefix if index == 0 else f"{prefix}{index}"}":{element}' for index in range(number)
        )
        return f"{number} entries {prefix[:20]} of {element[:30]}", "{" + entries + "}"

    def _number(self, _: Schema) -> tuple[str, str]:
        if self._rng.random() < 0.3:
            digits = self._rng.choice("19") * self._size(MAX_NUMBER_DIGITS)
            return f"number of {len(digits)} digits", self._rng.choice(["", "-", "0."]) + digits
        number = self._rng.choice(_NUMBERS)
        return f"number {number}", number

    def _at_bound(self, schema: Schema) -> tuple[str, str]:
        """Return a value at the bounds of what the schema accepts, and how it was made."""
        if "maxItems" in schema or "items" in schema:
            number = schema.get("maxItems", self._size(2000))
            inner = schema.get("items", {})
            return f"{number} items", "[" + ",".join(_distinct(inner, each) for each in range(number)) + "]"
        if "maxProperties" in schema:
            number, inner = schema["maxProperties"], schema.get("additionalProperties", {})
            return f"{number} entries", _object({str(each + 5): _sample(inner) for each in range(number)})
        if "maxLength" in schema:
            return "longest text", orjson.dumps("a" * schema["maxLength"]).decode()
        return "as the schema has it", _sample(schema)

    def _as_schema(self, _: Schema) -> tuple[str, str]:
        """A JSON schema or a part of one: structured outputs and tools compile it."""
        number = self._size(3000)
        kind = self._rng.choice(["properties", "enum", "anyOf", "pattern", "repeat", "refs", "additional"])
        made: Any
        match kind:
            case "properties":
                made = {"type": "object", "properties": {f"a{n}": {"type": "string"} for n in range(number)}}
            case "enum":
                made = {"enum": [f"a{n}" for n in range(number)]}
            case "anyOf":
                made = {"anyOf": [{"type": "string", "pattern": f"a{n}"} for n in range(number)]}
            case "pattern":
                made = {
                    "type": "string",
                    "pattern": self._rng.choice(["(a|b)", "[a-z]{1,9}", "a?", "(", "\\p"]) * number,
                }
            case "repeat":
                made = {"type": "string", "maxLength": number, "minLength": number // 2}
            case "refs":
                made = {
                    "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}},
                    "$ref": "#/$defs/a",
                }
            case _:
                made = {
                    "type": "object",
                    "additionalProperties": {"type": "array", "items": {"type": "number"}},
                }
        form = {"type": "json_schema", "name": "s", "schema": made}
        wrapped: Any = self._rng.choice(
            [
                made, {"type": "json_schema", "json_schema": {"name": "s", "schema": made}}, {"json": made},
                form, {"format": form}, [{"type": "function", "function": {"name": "f", "parameters": made}}],
                [{"type": "function", "name": "f", "parameters": made}],
                {"regex": str(made.get("pattern", "a{2}"))},
            ]
        )  # fmt: skip
        return f"schema {kind} × {number}", orjson.dumps(wrapped).decode()


def _member(schema: Schema, fits: Callable[[Schema], bool]) -> Schema:
    members: list[Schema] = [schema, *schema.get("oneOf", ()), *schema.get("anyOf", ())]
    return next(filter(fits, members), schema)


def _sample(schema: Schema) -> str:
    """JSON text of a small value that `schema` lets pass."""
    if "enum" in schema:
        return orjson.dumps(schema["enum"][0]).decode()
    for member in (*schema.get("oneOf", ()), *schema.get("anyOf", ())):
        return _sample(member)
    kinds = schema.get("type", "string")
    kind = kinds if isinstance(kinds, str) else kinds[0]
    if kind == "object":
        properties = schema.get("properties", {})
        named = (*schema.get("required", ()), *(["type"] if "enum" in properties.get("type", {}) else []))
        return _object({name: _sample(properties.get(name, {})) for name in named})
    if kind == "array":
        return "[" + (_sample(schema["items"]) if "items" in schema else "") + "]"
    return {"string": '"a"', "integer": "2", "number": "0.5", "boolean": "true", "null": "null"}[kind]


def _distinct(schema: Schema, index: int) -> str:
    """As `_sample`, different for each index where that is a number or a text."""
    text = _sample(schema)
    return {'"a"': f'"a{index}"', "2": str(index + 5)}.get(text, text)


def _object(fields: Mapping[str, str]) -> str:
    return "{" + ",".join(f"{orjson.dumps(name).decode()}:{each}" for name, each in fields.items()) + "}"


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _in_url(text: str) -> str:
    raw = _encoded(text.strip('"'))[:20_000]
    return "".join(chr(each) if chr(each).isalnum() else f"%{each:02x}" for each in raw) or "a"


def _form(target: Target, model: str, text: str) -> bytes:
    if not target.place:
        return _encoded(text)
    fields = {"model": model.encode(), "file": b"RIFF....WAVE", "purpose": b"vision"}
    fields[str(target.place[0])] = _encoded(text.strip('"'))
    parts = []
    for name, content in fields.items():
        file = '; filename="a.wav"' if name == "file" else ""
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        parts.append(head.encode() + content + b"\r\n")
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()
