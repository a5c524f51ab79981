"""What the person on call searches for: each warning and error is one constant phrase of the runbook."""

import ast
import re

import pytest

from tests.contract.product_sources import PACKAGES, ROOT, SOURCES, log_calls, shown

RUNBOOK = re.sub(r"\s+", " ", (ROOT / "docs" / "operations" / "runbook.md").read_text())
TABLE = (
    (ROOT / "docs" / "operations" / "runbook.md")
    .read_text()
    .partition("\n## Log messages\n")[2]
    .partition("\n## ")[0]
)
EXPLAINED = ("warning", "error", "exception", "critical")

CALLS = [(file, call) for file in SOURCES for call in log_calls(ast.parse(file.read_text()))]


def test_log_calls_are_found_at_all() -> None:
    assert {call.level for _, call in CALLS} >= {"info", "warning", "error"}
    sample = "log.warning('a b', x=1)\nself._log.error(f'{x} y')\nfuture.exception()\n"
    found = list(log_calls(ast.parse(sample)))
    assert [(call.level, call.message, call.text) for call in found] == [
        ("warning", "a b", "a b"),
        ("error", None, " y"),
    ]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_messages_are_constant(package: object) -> None:
    found = [
        f"{shown(file)}:{call.line}: {call.level}: {call.text!r} is not one constant; use fields"
        for file, call in CALLS
        if file.is_relative_to(str(package)) and call.message is None
    ]
    assert not found, "\n".join(["log messages that cannot be searched for:", *found])


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_warnings_and_errors_are_in_the_runbook(package: object) -> None:
    found = [
        f"{shown(file)}:{call.line}: {call.level}: {call.message}"
        for file, call in CALLS
        if file.is_relative_to(str(package))
        and call.level in EXPLAINED
        and f"`{call.message}`" not in RUNBOOK
    ]
    assert not found, "\n".join(["not in docs/operations/runbook.md, in backticks:", *found])


def test_the_runbooks_table_has_messages_that_exist() -> None:
    described = re.findall(r"^\| `([^`]+)` \|", TABLE, re.MULTILINE)
    assert described, "docs/operations/runbook.md has no section `Log messages` with a table"
    assert len(set(described)) == len(described)
    assert not set(described) - {call.message for _, call in CALLS}
