"""The product's source files, and what the tests of its vocabulary read from them."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(
    init.parent
    for group in ("libs", "services")
    for init in ROOT.glob(f"{group}/*/src/triptych_*/__init__.py")
)
SOURCES = [file for package in PACKAGES for file in sorted(package.rglob("*.py"))]
LEVELS = ("debug", "info", "warning", "error", "exception", "critical")


@dataclass(frozen=True)
class LogCall:
    level: str
    message: str | None  # None: not a constant
    text: str  # the constant parts of the message
    line: int


def log_calls(tree: ast.AST) -> Iterator[LogCall]:
    """Calls of loggers: objects whose name ends with `log` or `logger`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        name = name_of(node.func.value)
        if node.func.attr in LEVELS and name.lower().endswith(("log", "logger")):
            first = node.args[0]
            parts = [
                each.value
                for each in ast.walk(first)
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]
            message = (
                first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
            )
            yield LogCall(node.func.attr, message, "".join(parts), node.lineno)


def name_of(node: ast.expr) -> str:
    """The last name of `a.b.name`; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
