"""docs/operations/runbook.md lists exactly the error codes that the gateway can answer, and their status."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.contract.product_sources import ROOT
from triptych_common.protocol.messages import Modality
from triptych_common.runtime import drain
from triptych_vllm_connector.kv_failures import KvFailure

RUNBOOK = (ROOT / "docs" / "operations" / "runbook.md").read_text()
SOURCES = sorted((ROOT / "services" / "gateway" / "src").rglob("*.py"))

# Calls that make an error, with the place of its code among the arguments.
CODE_AT = {"RequestError": 1, "unavailable": 0, "EncodeUnavailableError": 0}
CODE = re.compile(r"[a-z]+(_[a-z0-9]+)*")


def strings_of(node: ast.AST) -> set[str]:
    """Every string that `node` may stand for: constants in it."""
    return {
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }


def answers_of(tree: ast.Module) -> Iterator[tuple[str, int | None]]:
    """(code, status) that a module may answer; None: the status is not written there."""
    assigned: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, set()).update(branches(node.value))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        place = CODE_AT.get(node.func.id)
        if place is None or len(node.args) <= place:
            continue
        status = status_of(node)
        named = [each.id for each in ast.walk(node.args[place]) if isinstance(each, ast.Name)]
        for code in branches(node.args[place]).union(*(assigned.get(name, set()) for name in named)):
            yield code, status


def status_of(call: ast.Call) -> int | None:
    if isinstance(call.func, ast.Name) and call.func.id != "RequestError":
        return 503
    first = call.args[0]
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, int) else None


def branches(node: ast.expr) -> set[str]:
    """Strings that the value of `node` may be; not those of a condition."""
    if isinstance(node, ast.IfExp):
        return branches(node.body) | branches(node.orelse)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        return set().union(*(branches(default) for default in node.args[1:]))  # not the key
    if isinstance(node, ast.JoinedStr):  # of a kind of media
        return {"".join(_text(part, modality) for part in node.values) for modality in Modality}
    return {text for text in strings_of(node) if CODE.fullmatch(text)}


def _text(part: ast.expr, modality: Modality) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else modality.value


def answered() -> dict[str, set[int]]:
    """Statuses by code."""
    found: dict[str, set[int]] = {}
    for path in (*SOURCES, Path(drain.__file__)):
        for code, status in answers_of(ast.parse(path.read_text())):
            found.setdefault(code, set()).update({status} if status is not None else set())
    for failure in KvFailure:  # of an instance that decodes: its host's middleware answers so
        found.setdefault(failure.value, set()).add(503)
    return found


def described() -> dict[str, str]:
    """Where a code is described: headings of its tables and second cells, by code."""
    section = RUNBOOK.split("## What callers see")[1].split("\n## ")[0]
    found: dict[str, str] = {}
    for part in section.split("\n### ")[1:]:
        heading = part.splitlines()[0]
        for code, cell in re.findall(r"^\| `([a-z0-9_]+)` \| ([^|]*)\|", part, re.MULTILINE):
            found[code] = f"{found.get(code, '')} {heading} {cell}"
    return found


def test_every_code_is_described_and_none_is_made_up() -> None:
    assert set(described()) == set(answered())


def test_every_status_of_a_code_is_described() -> None:
    places = described()
    missing = {
        (code, s) for code, statuses in answered().items() for s in statuses if str(s) not in places[code]
    }
    assert not missing
