"""Messages of each release are kept: this code reads what it wrote, and writes what it reads.

`golden/vX.Y.Z.json` holds a release's versions, messages and types. A change that fails here is not additive:
raise the version concerned, so that both sides refuse each other with a clear word, or make it additive. The
file of a version that is not released yet may be deleted; this test then writes it anew and fails once.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import orjson
import pytest
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tests.contract.product_sources import ROOT, SOURCES
from triptych_common import release
from triptych_common.protocol import codec, item_record, messages, store
from triptych_common.protocol.codec import BUS_MESSAGES
from triptych_common.protocol.errors import UnsupportedVersionError
from triptych_fabric.wire import frames, handshake
from triptych_gateway.encode.sizes import ItemSizes
from triptych_gateway.files.file_record import FileRecord
from triptych_gateway.request.named_items import MediaFacts
from triptych_gateway.responses.response_index import ResponseRecord

GOLDEN = Path(__file__).parent / "golden"
RELEASES = sorted(path.stem for path in GOLDEN.glob("v*.json"))
TYPES: tuple[type[BaseModel], ...] = (
    *BUS_MESSAGES, messages.InstanceRecord, messages.ECTransferParams,
    *get_args(get_args(store.StoreCommand)[0]), *get_args(get_args(store.StoreReply)[0]),
    frames.Offer, frames.OfferFailed, handshake.LinkHello, handshake.LinkChallenge, handshake.LinkProof,
    handshake.LinkWelcome, handshake.LinkRefusal,
    ItemSizes, FileRecord, ResponseRecord, MediaFacts,
)  # fmt: skip
PROSE = {"title", "description", "default"}


def kept(name: str) -> Any:
    return orjson.loads((GOLDEN / f"{name}.json").read_bytes())


def of_this_code() -> dict[str, Any]:
    _, schema = models_json_schema([(each, "validation") for each in TYPES])
    files = sorted(path for path in GOLDEN.iterdir() if not path.match("v*.json"))
    return {
        "schema_version": messages.SCHEMA_VERSION,
        "store_protocol_version": store.STORE_PROTOCOL_VERSION,
        "record_version": item_record.RECORD_VERSION,
        "messages": {path.name: path.read_bytes().decode("latin-1") for path in files},
        "types": without_prose(schema["$defs"]),
    }


def without_prose(schema: Any, *, names: bool = True) -> Any:
    """`names`: the keys are those of types or fields, which may be called `title`."""
    if isinstance(schema, list):
        return [without_prose(each, names=False) for each in schema]
    if not isinstance(schema, dict):
        return schema
    shown = {key: each for key, each in schema.items() if names or key not in PROSE}
    return {key: without_prose(each, names=not names and key == "properties") for key, each in shown.items()}


def reread(name: str, data: bytes) -> tuple[Any, Any]:
    """The JSON in a kept message, and that of the message which this code reads there."""
    match name.partition("_")[0]:
        case "bus":
            fields = dict(line.split(b"\t", 1) for line in data.splitlines())
            return fields[b"body"], codec.encode(codec.decode(fields).message)[b"body"]
        case "registry":
            return data, codec.encode_record(codec.decode_record(data))
        case "command":
            return data[4:], codec.frame(codec.decode_command(data[4:]))[4:]
        case "reply":
            return data[4:], codec.frame(codec.decode_reply(data[4:]))[4:]
        case _:
            return data, messages.ECTransferParams.model_validate_json(data, strict=True).model_dump_json()


def lost(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Places of `old` that `new` does not repeat; `new` may have more fields."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name, each in old.items():
            yield from lost(each, new.get(name), f"{place}.{name}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (each, other) in enumerate(zip(old, new, strict=True)):
            yield from lost(each, other, f"{place}[{index}]")
    elif old != new:
        yield f"{place}: {old!r} is {new!r}"


def breaks(old: Any, new: Any, place: str) -> Iterator[str]:
    """Yield each reason why one of the two types refuses, or misses a part of, the other's messages."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new:
            yield f"{place}: another type, {new!r}, before {old!r}"
        return
    before, after = old.get("properties", {}), new.get("properties", {})
    added = after.keys() - before.keys()
    yield from (f"{place}.{name} is gone" for name in sorted(before.keys() - after.keys()))
    yield from (f"{place}.{name} has no default" for name in sorted(added & set(new.get("required", ()))))
    if added and old.get("additionalProperties") is False:
        yield f"{place}: its readers are strict and refuse {sorted(added)}"
    for name in sorted(before.keys() & after.keys()):
        yield from breaks(before[name], after[name], f"{place}.{name}")
    for key in sorted((old.keys() | new.keys()) - {"properties", "required"}):
        yield from breaks(old.get(key), new.get(key), f"{place} {key}")


def test_messages_of_this_version_are_kept() -> None:
    path = GOLDEN / f"v{release()}.json"
    if not path.exists():
        path.write_bytes(orjson.dumps(of_this_code()) + b"\n")
        pytest.fail(f"{path.name} was missing and has been written; review it")


@pytest.mark.parametrize("name", RELEASES)
def test_messages_of_a_release_are_read_or_refused_by_version(name: str) -> None:
    before = kept(name)
    for file, text in before["messages"].items():
        kind = file.partition("_")[0]
        if kind in ("bus", "registry") and before["schema_version"] != messages.SCHEMA_VERSION:
            with pytest.raises(UnsupportedVersionError):
                reread(file, text.encode("latin-1"))
            continue
        if kind in ("command", "reply") and before["store_protocol_version"] != store.STORE_PROTOCOL_VERSION:
            continue  # the session ends at Hello
        old, new = reread(file, text.encode("latin-1"))
        assert list(lost(orjson.loads(old), orjson.loads(new))) == [], file


@pytest.mark.parametrize("name", RELEASES)
def test_types_have_only_gained_fields_with_defaults_since_a_release(name: str) -> None:
    before, after = kept(name), of_this_code()
    if any(before[each] != after[each] for each in before if each.endswith("_version")):
        pytest.skip("another version, which is refused by name")
    types = after["types"]
    faults = [fault for each, old in before["types"].items() for fault in breaks(old, types.get(each), each)]
    assert faults == []


OLD = {"properties": {"a": {"type": "string"}}, "required": ["a"], "type": "object"}


@pytest.mark.parametrize(
    ("new", "fault"),
    [
        ({**OLD, "properties": {}, "required": []}, "T.a is gone"),
        ({**OLD, "properties": {"a": {"type": "integer"}}}, "T.a type: another type, 'integer'"),
        ({**OLD, "properties": {**OLD["properties"], "b": {}}, "required": ["a", "b"]}, "T.b has no default"),
        (None, "T: another type"),
    ],
)
def test_other_changes_are_found(new: Any, fault: str) -> None:
    assert [each[: len(fault)] for each in breaks(OLD, new, "T")] == [fault]
    assert list(breaks(OLD, {**OLD, "properties": {**OLD["properties"], "b": {}}}, "T")) == []


def test_all_members_have_one_version() -> None:
    files = ROOT.glob("*/*/pyproject.toml")
    versions = {str(path): tomllib.loads(path.read_text())["project"]["version"] for path in files}
    assert len(versions) == 8
    assert {path: each for path, each in versions.items() if each != release()} == {}


def test_members_need_each_other_in_one_version() -> None:
    for path in ROOT.glob("*/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        needed = [each for some in (project["dependencies"], *extras) for each in some]
        assert len(set(project["dependencies"])) == len(project["dependencies"]), path
        ours = [each for each in needed if each.startswith("triptych-")]
        assert [each for each in ours if not each.endswith(f"=={release()}")] == [], path
        assert project["license"] == "Apache-2.0", path


def test_words_of_refusals_are_those_of_the_code() -> None:
    page = (ROOT / "docs/operations/upgrading.md").read_text().split("## What is refused")[1]
    rows = [line.split("|")[2] for line in page.splitlines() if line.startswith("| ")][1:]
    words = [each for row in rows for each in re.findall(r"`([^`]+)`", row)]
    assert len(words) > len(rows) > 5
    code = "\n".join(path.read_text() for path in SOURCES)
    assert [each for each in words if each not in code] == []
