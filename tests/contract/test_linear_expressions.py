"""No regular expression of a service takes more than linear time: callers choose the texts that it is run on.

An expression is refused where two unbounded repetitions can take the same characters: one inside the other,
or one behind the other with nothing between that the first does not take. A search tries every start, so one
is refused where its beginning can stand inside a repetition that something must follow.

Patterns of pydantic's are run by Rust's engine, which is linear.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest

from tests.contract.product_sources import ROOT, SOURCES

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import sre_constants as ops
    import sre_parse

SEARCHES = {"search", "sub", "subn", "split", "findall", "finditer"}
CALLS = {"compile", "match", "fullmatch", *SEARCHES}
_PARTS = count()
MANY = 256  # repetitions from which one counts as unbounded
ALPHABET = [*map(chr, range(256)), "\u2028", "\u6f22"]  # enough to tell classes apart


@dataclass(frozen=True)
class Step:
    """One part of an expression, without its groups: which characters it takes, and how often."""

    chars: frozenset[str]
    first: frozenset[str]  # characters that it can begin with
    is_unbounded: bool = False
    is_possessive: bool = False
    may_be_empty: bool = False
    options: frozenset[int] = frozenset()  # optional parts that it is in


def faults(pattern: str | bytes, flags: int = 0, *, is_searched: bool = False) -> list[str]:
    """Why `pattern` may take more than linear time."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parsed = sre_parse.parse(text, flags)
    found = list[str]()
    for way in _ways(parsed, parsed.state.flags, found):
        found += _overlaps(way)
        if is_searched:
            found += _starts_again(way)
    return sorted(set(found))


def _overlaps(way: list[Step]) -> Iterator[str]:
    for index, step in enumerate(way):
        if not step.is_unbounded or step.is_possessive:
            continue
        for other in way[index + 1 :]:
            if other.is_unbounded and step.chars & other.first:
                yield "two repetitions of the same characters side by side"
            if not other.may_be_empty and not step.chars & other.first:
                break  # what separates them stands where the first one ends


def _starts_again(way: list[Step]) -> Iterator[str]:
    for index, step in enumerate(way):
        later = way[index + 1 :]
        is_followed = any(not other.may_be_empty and other.options <= step.options for other in later)
        if step.is_unbounded and is_followed and all(other.chars & step.chars for other in way[:index]):
            yield "a search that begins again inside a repetition"


def _ways(items: Any, flags: int, found: list[str]) -> list[list[Step]]:
    """All sequences of steps that `items` stands for; faults inside of them go to `found`."""
    ways = [list[Step]()]
    for op, value in items:
        ways = [way + more for way in ways for more in _of_item(op, value, flags, found)]
    return ways


def _of_item(op: Any, value: Any, flags: int, found: list[str]) -> list[list[Step]]:
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT):
        low, high, inner = value
        return _of_repeat(low, high, _ways(inner, flags, found), op is ops.POSSESSIVE_REPEAT, found)
    if op is ops.SUBPATTERN:
        return _ways(value[3], flags, found)
    if op is ops.ATOMIC_GROUP:
        return _ways(value, flags, found)
    if op is ops.BRANCH:
        return [way for branch in value[1] for way in _ways(branch, flags, found)]
    if op is ops.AT:  # only one place has it
        return [[Step(frozenset(), frozenset())]]
    if op in (ops.ASSERT, ops.ASSERT_NOT):
        return [[]]
    if op in (ops.GROUPREF, ops.GROUPREF_EXISTS):
        found.append("a reference to a group")
        return [[]]
    chars = _chars(op, value, flags)
    return [[Step(chars, chars)]]


def _of_repeat(
    low: int, high: Any, ways: list[list[Step]], is_possessive: bool, found: list[str]
) -> list[list[Step]]:
    is_unbounded = high is ops.MAXREPEAT or high >= MANY
    if not is_unbounded:
        repeated = [way * min(max(high, 1), 2) for way in ways]
        return repeated if low else [[], *(_optional(way) for way in repeated)]
    for way in ways:
        is_nested = any(step.is_unbounded and not step.is_possessive for step in way)
        if is_nested and list(_overlaps([*way, *way])):
            found.append("a repetition inside another of the same characters")
    chars = frozenset[str]().union(*(step.chars for way in ways for step in way))
    first = frozenset[str]().union(*(_first(way) for way in ways))
    return [[Step(chars, first, is_unbounded=True, is_possessive=is_possessive, may_be_empty=low == 0)]]


def _optional(way: list[Step]) -> list[Step]:
    part = frozenset({next(_PARTS)})
    return [replace(step, options=step.options | part) for step in way]


def _first(way: list[Step]) -> frozenset[str]:
    """Characters that a sequence can begin with."""
    found = frozenset[str]()
    for step in way:
        found |= step.first
        if not step.may_be_empty:
            break
    return found


def _chars(op: Any, value: Any, flags: int) -> frozenset[str]:
    """Return the characters of `ALPHABET` that this piece of an expression matches."""
    single = re.compile(_source(op, value), flags & (re.IGNORECASE | re.DOTALL | re.ASCII))
    return frozenset(char for char in ALPHABET if single.fullmatch(char))


def _source(op: Any, value: Any) -> str:
    if op is ops.ANY:
        return "."
    if op is ops.LITERAL:
        return re.escape(chr(value))
    if op is ops.NOT_LITERAL:
        return f"[^{re.escape(chr(value))}]"
    if op is ops.CATEGORY:
        return _CATEGORIES[value]
    if op is ops.RANGE:
        return f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
    if op is ops.IN:
        is_negated = value[0][0] is ops.NEGATE
        inner = "".join(_source(*each) for each in value[is_negated:])
        return f"[{'^' if is_negated else ''}{inner}]"
    raise AssertionError(f"an unknown part of an expression: {op}")


_CATEGORIES = {
    ops.CATEGORY_DIGIT: r"\d", ops.CATEGORY_NOT_DIGIT: r"\D", ops.CATEGORY_SPACE: r"\s",
    ops.CATEGORY_NOT_SPACE: r"\S", ops.CATEGORY_WORD: r"\w", ops.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip


# ---- what the services have ------------------------------------------------------------------------
def expressions(source: str, searched: frozenset[str]) -> Iterator[tuple[int, ast.expr, int, bool]]:
    """Line, argument and flags of each call that compiles an expression, and whether it is searched for."""
    tree = ast.parse(source)
    names = {
        id(node.value): node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        module = node.func.value
        if isinstance(module, ast.Name) and module.id in ("re", "regex") and node.func.attr in CALLS:
            flags = 0
            for each in (*node.args[1:], *(word.value for word in node.keywords)):
                for part in ast.walk(each):
                    if isinstance(part, ast.Attribute) and hasattr(re, part.attr):
                        flags |= int(getattr(re, part.attr))
            is_searched = node.func.attr in SEARCHES or names.get(id(node)) in searched
            yield node.lineno, node.args[0], flags, is_searched


def constants(source: str) -> dict[str, str | bytes]:
    """Texts that a module gives names to."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                continue
            if isinstance(value, (str, bytes)):
                found[node.targets[0].id] = value
    return found


def text_of(node: ast.expr, names: dict[str, str | bytes]) -> str | bytes | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, (str, bytes)) else None


# Modules with an expression that is put together, and why it is linear.
PUT_TOGETHER = {
    "libs/common/src/triptych_common/protocol/urls.py": "one repetition of one class, with a bound",
    "libs/common/src/triptych_common/telemetry/trace_files.py": "names of files that services write",
}


def test_every_expression_of_the_services_is_linear() -> None:
    shared = {}
    for path in SOURCES:
        shared |= constants(path.read_text())
    uses = "|".join(SEARCHES)
    searched = frozenset(
        name for path in SOURCES for name in re.findall(rf"\b(\w+)\.(?:{uses})\(", path.read_text())
    )
    wrong, seen, put_together = [], 0, set()
    for path in SOURCES:
        source = path.read_text()
        for line, node, flags, is_searched in expressions(source, searched):
            module = str(path.relative_to(ROOT))
            place = f"{module}:{line}"
            pattern = text_of(node, {**shared, **constants(source)})
            if pattern is None:
                put_together.add(module)
                if module not in PUT_TOGETHER:
                    wrong.append(f"{place}: not a constant: {ast.unparse(node)}")
                continue
            seen += 1
            found = faults(pattern, flags, is_searched=is_searched)
            wrong += [f"{place}: {fault}: {pattern!r}" for fault in found]
    assert seen > 20
    assert put_together == PUT_TOGETHER.keys()
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "pattern",
    [
        r"input_value=\{'error': \{.*'code': 4\d\d\}\}, input_type=",  # the gateway had it: 43 s for 368 kB
        r"(?:/[\w\-]+)+/[\w\-]+\.\w+",
        r"(a+)+b",
        r"(a|aa)+$x*x*",
        r"\s*\s*x",
        r"a*b?a*c",
        r"(?:[^,]*;?)*x",
        rb"a+[a-z]+",
        r"(.)\1*",
    ],
)
def test_what_backtracks_is_found(pattern: str | bytes) -> None:
    assert faults(pattern, is_searched=True)


@pytest.mark.parametrize(
    "pattern",
    [
        r"a+b+", r"[^,]*,[^,]*", r"data:([^,;]*)((?:;[^,;]*)*),", r"a{3,8}a{2}", r"(?:ab)*c",
        r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?',
    ],
)  # fmt: skip
def test_what_does_not_backtrack_passes(pattern: str) -> None:
    assert not faults(pattern, re.DOTALL)


def test_a_search_whose_beginning_cannot_stand_in_its_repetition_passes() -> None:
    assert not faults(r"/lib[^/]*x", is_searched=True)
    assert not faults(r"^a[^/]*x", is_searched=True)
    assert not faults(r"a+(?:=b)?", is_searched=True)
