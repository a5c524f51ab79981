"""Every state machine drawn in docs/design/architecture.md is an Enum and a table in the module it names.

A drawing is a code block below a line `**Name** [`package.module`]`. The module has `ALLOWED`. States are the
words in capitals. Only functions that call `check_transition` assign a state, and they check the step that
they take: no owner needs a test of each illegal step.
"""

import ast
import importlib
import re
from enum import Enum

import pytest

from tests.contract.product_sources import ROOT, SOURCES

PAGE = (ROOT / "docs" / "design" / "architecture.md").read_text()
SECTION = PAGE.split("\n## State machines")[1].split("\n## ")[0]
DRAWN = re.findall(r"^\*\*([^*]+)\*\*[^\n]*? \[`([a-z_.]+)`\][^\n]*\n+```\n(.*?)```", SECTION, re.M | re.S)
STATE = re.compile(r"\b[A-Z][A-Z_]{2,}\b")
# The state of another machine's record as it is read (from Redis, from a header), not a step.
CONSTRUCTORS = {"__init__", "__post_init__"}


def table_of(module: str) -> dict[Enum, frozenset[Enum]]:
    full = module if module.startswith("triptych_") else f"triptych_{module}"
    table: dict[Enum, frozenset[Enum]] = importlib.import_module(full).ALLOWED
    return table


def test_drawings_are_found_at_all() -> None:
    assert len(DRAWN) == SECTION.count("\n```\n") / 2 >= 8


@pytest.mark.parametrize(("module", "drawing"), [pytest.param(m, d, id=name) for name, m, d in DRAWN])
def test_a_drawing_has_the_states_of_its_table(module: str, drawing: str) -> None:
    table = table_of(module)
    states = {state.name for state in type(next(iter(table)))}
    assert {state.name for state in table} == states, "each state has its line in the table"
    drawn = set(STATE.findall(drawing))
    assert drawn == states, f"{module}: drawn only {drawn - states}, not drawn {states - drawn}"


@pytest.mark.parametrize("module", [pytest.param(m, id=name) for name, m, _ in DRAWN])
def test_every_state_can_be_reached(module: str) -> None:
    table = table_of(module)
    first = next(iter(table))
    reached, left = {first}, [first]
    while left:
        for state in table[left.pop()] - reached:
            reached.add(state)
            left.append(state)
    assert reached == set(table), "from the table's first state"


def test_every_table_is_drawn() -> None:
    tables = {
        ".".join(path.relative_to(path.parents[path.parts[::-1].index("src") - 1]).with_suffix("").parts)
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == "ALLOWED"
    }
    assert tables == {m if m.startswith("triptych_") else f"triptych_{m}" for _, m, _ in DRAWN}


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def assigns_state(function: ast.AST) -> bool:
    return any(
        isinstance(target, ast.Attribute) and target.attr in ("state", "_state")
        for node in ast.walk(function)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )


def checks(function: ast.AST) -> bool:
    called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(isinstance(each, ast.Name) and each.id == "check_transition" for each in called)


def test_a_state_is_assigned_only_where_the_step_is_checked() -> None:
    unchecked = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        tables = {
            node.target.id
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        if "ALLOWED" not in tables:
            continue
        owners = [
            each.name for each in functions(tree) if assigns_state(each) and each.name not in CONSTRUCTORS
        ]
        guilty = [each.name for each in functions(tree) if each.name in owners and not checks(each)]
        if guilty:
            unchecked.append(f"{path.relative_to(ROOT)}: {guilty}")
        assert len(owners) <= 1, f"{path.relative_to(ROOT)}: assigned in {owners}"
    assert not unchecked


def steps(function: ast.AST) -> list[str]:
    """Steps that the function checks, of records that exist: `table: state = new state`."""
    return [
        f"{ast.unparse(table)}: {ast.unparse(state)} = {ast.unparse(to)}"
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "check_transition"
        for table, _, state, to in [node.args]
        if ast.unparse(state) != "None"
    ]


def test_the_step_that_is_checked_is_the_one_that_is_taken() -> None:
    owners = set()
    for path in SOURCES:
        for function in functions(ast.parse(path.read_text())):
            for step in steps(function):
                state, _, to = step.removeprefix("ALLOWED: ").partition(" = ")
                after = ast.unparse(function).rpartition("check_transition(")[2]
                updates = f"{state.rpartition('.')[0]} = " in after and f"'state': {to}" in after
                assert f"{state} = {to}\n" in f"{after}\n" or updates, f"{path.relative_to(ROOT)}: {step}"
                owners.add(path)
    in_python = {m for _, m, _ in DRAWN} - {"common.coordination.single_flight"}  # whose owner is Lua
    assert len(owners) == len(in_python)
