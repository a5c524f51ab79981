"""Checks of parsed JSON against the schemas of `endpoints.fields`, in one pass up to the first fault.

The checks know JSON Schema's `type`, `enum`, `properties`, `required`, `additionalProperties`,
`propertyNames`, `items`, `maxItems`, `maxLength`, `maxProperties`, and `oneOf` beside a `discriminator`;
other keywords describe, and are vLLM's to check.
"""

from collections.abc import Callable, Mapping
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_gateway.endpoints.endpoint import Schema

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
