"""Write the tables of docs/reference/configuration.md: names, defaults, types and meanings of all settings.

    python docs/write_configuration.py

Run it after a change of a setting; a test compares. The rest of the page is written by hand, and so are
defaults that are computed while a service starts (`its own host and port`).
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from triptych_cache_store.settings import StoreSettings
from triptych_common.runtime import ServiceSettings
from triptych_encoder.settings import EncoderSettings
from triptych_fabric.settings import FabricSettings
from triptych_gateway.settings import GatewaySettings
from triptych_prefill_decode.settings import PrefillDecodeSettings

PAGE = Path(__file__).resolve().parent / "reference" / "configuration.md"
SECTIONS: dict[str, type[ServiceSettings]] = {
    "Every service": ServiceSettings,
    "Gateway": GatewaySettings,
    "Encoder": EncoderSettings,
    "Prefill_decode": PrefillDecodeSettings,
    "Cache_store": StoreSettings,
    "Fabric agent": FabricSettings,
}
HEAD = "| setting | default | type | meaning |\n|---|---|---|---|\n"
TABLE = re.compile(r"\| setting \| default \|.*\n\|[-|]+\|\n((?:\|.*\n)*)")
UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
DAY_S = 86_400
TYPES = {"integer": "whole number", "number": "number", "boolean": "`true` or `false`", "string": "text"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def written(page: str) -> str:
    """Return `page` with its tables of settings written anew."""
    for title, cls in SECTIONS.items():
        start = page.index(f"\n## {title}\n")
        found = TABLE.search(page, start)
        if found is None:
            raise ValueError(f"the section {title} has no table of settings")
        rows = "".join(f"{row}\n" for row in _rows(cls, found[1].splitlines()))
        page = page[: found.start()] + HEAD + rows + page[found.end() :]
    return page


def _rows(cls: type[ServiceSettings], lines: list[str]) -> Iterator[str]:
    schema = cls.model_json_schema(by_alias=False, mode="validation")
    by_hand = {cells[0]: cells[1] for cells in (_cells(line) for line in lines)}
    for field_name in own_fields(cls):
        name = f"`{f'TRIPTYCH_{field_name}'.upper()}`"
        field = cls.model_fields[field_name]
        row = (
            name,
            default_text(field_name, field, by_hand.get(name, "none")),
            type_text(schema["properties"][field_name], schema),
            " ".join((field.description or "").split()).replace("|", r"\|"),
        )
        yield f"| {' | '.join(row)} |"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def own_fields(cls: type[ServiceSettings]) -> list[str]:
    """Return the fields of `cls` that not every service has alike."""
    shared = {} if cls is ServiceSettings else ServiceSettings.model_fields
    return [
        name
        for name, field in cls.model_fields.items()
        if name not in shared or field.default != shared[name].default
    ]


def default_text(name: str, field: FieldInfo, by_hand: str) -> str:
    """Return the table's cell; `by_hand` stands for a default that is computed at the start."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=False)
    if value is None or value is PydanticUndefined:
        empty = None if field.default_factory is None else _made(field)
        return by_hand if empty is None else f"`{_json(empty)}`"
    if isinstance(value, str | bool | int | float):
        return f"`{value}`{_in_units(name, value)}"
    return f"`{_json(value)}`"


def _made(field: FieldInfo) -> Any:
    """Return a factory's empty collection; None if the default depends on the machine or other settings."""
    return {list: [], dict: {}, tuple: ()}.get(field.default_factory)  # type: ignore[call-overload]


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


def _in_units(name: str, value: str | float) -> str:
    if isinstance(value, int) and name.endswith("bytes"):
        for unit, size in UNITS:
            if value >= size and not value % size:
                return f" ({value // size} {unit})"
    if name.endswith("_s") and isinstance(value, int) and value >= DAY_S and not value % DAY_S:
        days = value // DAY_S
        return f" ({days} day{'s' if days > 1 else ''})"
    return ""


def type_text(described: dict[str, Any], schema: dict[str, Any]) -> str:
    """Describe the type of a JSON Schema property in words, with the bounds of its values."""
    if (reference := described.get("$ref")) is not None:
        return type_text(schema["$defs"][reference.rpartition("/")[2]], schema)
    if (choices := described.get("enum")) is not None:
        return ", ".join(f"`{each}`" for each in choices)
    if (variants := described.get("anyOf")) is not None:
        words = [type_text(each, schema) for each in variants if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(words))
    kind = described.get("type", "")
    if kind == "array":
        return f"list of {_plural(type_text(described['items'], schema))}"
    if kind == "object":
        return "JSON object"
    if kind == "string":
        return {"path": "path", "ipv4network": "network", "ipv6network": "network"}.get(
            described.get("format", ""), TYPES[kind]
        )
    bounds = [f"{sign} {described[key]:g}" for key, sign in BOUNDS.items() if key in described]
    return " ".join([TYPES[kind], ", ".join(bounds)]).strip()


def _plural(words: str) -> str:
    return re.sub(r"\b(number|network)\b", r"\1s", words)


def main() -> None:
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
