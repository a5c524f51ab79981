"""Docstrings stand alone: none begins with a preposition or relative word, none has fewer than four words."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.contract.product_sources import ROOT, SOURCES

COVERED = ("libs", "services")
"""Folders whose docstrings keep the rule; the others are still to be written anew."""

LEANS = re.compile(
    r"(About|Above|After|Against|Among|As|At|Because|Before|Behind|Below|Beside|Besides|Between|Beyond|By|During"
    r"|Except|For|From|How|If|In|Inside|Into|Like|Likewise|Of|On|Out|Outside|Over|Since|That|Than|These|This"
    r"|Those|Through|To|Toward|Under|Unless|Until|Upon|What|Whatever|When|Whenever|Where|Wherever|Whether|Which"
    r"|Whichever|While|Who|Whoever|Whom|Whose|Why|With|Within|Without)\b"
)
MIN_WORDS = 4


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those below fields and constants among them."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for before, statement in zip([node, *node.body], node.body, strict=False):
            if isinstance(before, ast.AnnAssign | ast.Assign) or before is node:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield statement.lineno, text.strip()


def faults(source: str) -> list[tuple[int, str]]:
    return sorted(
        (line, text.partition("\n")[0])
        for line, text in docstrings(ast.parse(source))
        if LEANS.match(text) or len(text.split()) < MIN_WORDS
    )


def test_docstrings_that_lean_or_are_short_are_found() -> None:
    sample = '"""Whether it works."""\nX = 1\n"""Of memory."""\ndef f():\n    """Return the offset of X."""\n'
    assert [line for line, _ in faults(sample)] == [1, 3]


@pytest.mark.parametrize("folder", COVERED)
def test_docstrings_stand_alone(folder: str) -> None:
    sources = [file for file in SOURCES if file.is_relative_to(ROOT / folder)]
    assert sources
    found = [f"{file}:{line}: {text}" for file in sources for line, text in faults(file.read_text())]
    assert not found, "\n".join(found)
