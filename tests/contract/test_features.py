"""docs/guide/features.md names tests that exist, and every test of a feature is in it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE_TESTS = ROOT / "tests" / "engine"
PAGE = (ROOT / "docs" / "guide" / "features.md").read_text()
TEST = re.compile(r"`([\w/]+\.py)::(\w+)(?:\[([^\]]+)\])?`")
ROW = re.compile(r"^\| (?!feature |---)(.+) \|$", re.MULTILINE)


def cases_of(file: Path) -> dict[str, frozenset[str]]:
    """By test function: the cases that it is given by a dictionary of its module; empty where by none."""
    tree = ast.parse(file.read_text())
    tables: dict[str, frozenset[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
            keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            tables[ast.unparse(node.target)] = frozenset(map(str, keys))
    return {
        node.name: frozenset().union(*(tables.get(name, frozenset()) for name in _parameters(node)))
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def _parameters(function: ast.FunctionDef) -> list[str]:
    """What its `parametrize` decorators take values from."""
    calls = [each for each in function.decorator_list if isinstance(each, ast.Call)]
    return [ast.unparse(call.args[1]) for call in calls if ast.unparse(call.func).endswith("parametrize")]


def test_every_test_that_is_named_exists() -> None:
    named = TEST.findall(PAGE)
    assert len(named) > 30
    for path, function, case in named:
        cases = cases_of(ENGINE_TESTS / path)
        assert function in cases, f"{path}::{function}"
        assert not case or case in cases[function], f"{path}::{function}[{case}]"


def test_every_row_names_its_test() -> None:
    rows = ROW.findall(PAGE)
    assert len(rows) > 30
    for row in rows:
        assert TEST.search(row.rpartition(" | ")[2]), row


def test_every_test_of_a_feature_is_in_the_table() -> None:
    named = set(TEST.findall(PAGE))
    files = sorted((ENGINE_TESTS / "features").glob("test_*.py"))
    assert files
    for file in files:
        path = str(file.relative_to(ENGINE_TESTS))
        for function, cases in cases_of(file).items():
            wanted = {(path, function, case) for case in cases}
            assert (path, function, "") in named or (wanted and wanted <= named), f"{path}::{function}"
