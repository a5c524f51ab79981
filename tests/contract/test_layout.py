"""The shape of the tree: small folders with a map in each, short files, each class name once."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.contract.product_sources import PACKAGES, ROOT, SOURCES, shown

MAX_MODULES = 15
MAX_LINES = 400
FOLDERS = sorted({file.parent for file in SOURCES})
FILES = [
    file
    for folder in ("libs", "services", "tests", "benchmarks")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if ".venv" not in file.parts
]
SAME_NAME: dict[str, str] = {}
"""Class names that exist more than once, with the reason."""


def modules_of(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.py") if not file.stem.startswith("__"))


def subfolders_of(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if any(each.glob("*.py")))


def missing_in_map(folder: Path) -> list[str]:
    """Modules and subfolders that the docstring of the folder's `__init__` does not name."""
    init = folder / "__init__.py"
    text = (ast.get_docstring(ast.parse(init.read_text())) or "") if init.exists() else ""
    named = set(re.findall(r"\w+", text))
    return [name for name in (*modules_of(folder), *subfolders_of(folder)) if name not in named]


def classes() -> dict[str, list[str]]:
    """Where each class name is defined; without private ones."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{shown(file)}:{node.lineno}")
    return places


def test_packages_are_found_at_all() -> None:
    assert len(PACKAGES) >= 7
    assert len(FOLDERS) > len(PACKAGES)
    assert "Supervisor" in classes()


@pytest.mark.parametrize("folder", FOLDERS, ids=shown)
def test_a_folder_has_few_modules(folder: Path) -> None:
    modules = modules_of(folder)
    assert len(modules) <= MAX_MODULES, f"{len(modules)}: {', '.join(modules)}"


@pytest.mark.parametrize("folder", FOLDERS, ids=shown)
def test_a_folders_docstring_names_what_is_in_it(folder: Path) -> None:
    missing = missing_in_map(folder)
    assert not missing, f"{shown(folder / '__init__.py')} does not name {', '.join(missing)}"


def test_a_map_that_is_not_complete_is_found(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("one.py", "two.py", "__main__.py", "inner/__init__.py"):
        (tmp_path / name).touch()
    assert missing_in_map(tmp_path) == ["one", "two", "inner"]
    (tmp_path / "__init__.py").write_text('"""one   the first, and only_two\ninner/   the rest\n"""\n')
    assert missing_in_map(tmp_path) == ["two"]


def test_no_file_is_long() -> None:
    lengths = {shown(file): len(file.read_text().splitlines()) for file in FILES}
    assert not {file: length for file, length in lengths.items() if length > MAX_LINES}


def test_a_class_name_exists_once() -> None:
    twice = {name: places for name, places in classes().items() if len(places) > 1 and name not in SAME_NAME}
    assert not twice, "\n".join(f"{name}: {', '.join(places)}" for name, places in sorted(twice.items()))


def test_every_exception_is_needed() -> None:
    assert not [name for name in SAME_NAME if len(classes()[name]) < 2]
