"""Identifiers and log messages use none of the synonyms that docs/reference/glossary.md bans.

An entry of the glossary is a line `**term** · text`; it may end with `*Not:* word, another, two words.`
A banned word is found in any identifier that has it as a part (`ticket` in `TicketTable`, `old_tickets`).
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.product_sources import PACKAGES, ROOT, SOURCES, log_calls, shown

GLOSSARY = (ROOT / "docs" / "reference" / "glossary.md").read_text()
ENTRY = re.compile(r"^\*\*(?P<term>.+?)\*\* · .*\*Not:\* (?P<bans>.+?)\.?$", re.MULTILINE)
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

Words = tuple[str, ...]

EXEMPT: dict[tuple[str, str], str] = {}
"""(end of a path, identifier): the reason for which a banned word may stand there."""


def words_of(text: str) -> Words:
    """In lower case and the singular: of an identifier, or of a phrase."""
    return tuple(each.lower().removesuffix("s") for each in PART.findall(text))


def banned(glossary: str) -> dict[Words, str]:
    """The term to use, by the words that are banned for it."""
    return {
        words_of(ban): entry["term"].replace("`", "")
        for entry in ENTRY.finditer(glossary)
        for ban in entry["bans"].split(",")
        if words_of(ban)
    }


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What a module itself names: classes, functions, parameters, attributes, variables; with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)):
                yield name, node.lineno
            case ast.alias(asname=str(name)):
                yield name, node.lineno
            case _:
                pass


def offences(source: str, path: str, bans: dict[Words, str]) -> Iterator[str]:
    """One line for each banned word in a file: place, text, word and the term to use."""
    tree = ast.parse(source)
    texts = [(name, line) for name, line in identifiers(tree) if not is_exempt(path, name)]
    texts += [(call.text, call.line) for call in log_calls(tree)]
    texts.sort(key=lambda text: text[1])
    stem = Path(path).parent.name if path.endswith("__init__.py") else Path(path).stem
    for text, line in [(stem, 1), *texts]:
        words = words_of(text)
        for ban, term in bans.items():
            if any(words[at : at + len(ban)] == ban for at in range(len(words))):
                yield f"{path}:{line}: {text!r} has the word {' '.join(ban)!r}; the glossary's is {term!r}"


def is_exempt(path: str, name: str) -> bool:
    return any(path.endswith(end) and name == exempt for end, exempt in EXEMPT)


SAMPLE = """
class TicketTable:
    def __init__(self, holder: str) -> None:
        self.last_words = holder

    def ask(self, last: str) -> None:
        words = last
        log.info("a ticket was lost", words=words)
"""
SAMPLE_GLOSSARY = """
**media wait** · What a request waits for. *Not:* ticket, `subscriber`.

**final ack** · The last message about an item. *Not:* last word.

**pin** · Keeps an entry.
"""


def test_banned_words_are_read_from_the_glossary() -> None:
    assert banned(SAMPLE_GLOSSARY) == {
        ("ticket",): "media wait",
        ("subscriber",): "media wait",
        ("last", "word"): "final ack",
    }


def test_a_banned_word_is_found_wherever_a_name_is_given() -> None:
    found = list(offences(SAMPLE, "a/subscribers.py", banned(SAMPLE_GLOSSARY)))
    assert [re.sub(r" has .*", "", each) for each in found] == [
        "a/subscribers.py:1: 'subscribers'",
        "a/subscribers.py:2: 'TicketTable'",
        "a/subscribers.py:4: 'last_words'",
        "a/subscribers.py:8: 'a ticket was lost'",
    ]
    assert "the glossary's is 'final ack'" in found[2]


def test_the_glossary_bans_words() -> None:
    assert banned(GLOSSARY)


def test_no_term_of_the_glossary_is_banned_by_another() -> None:
    bans = banned(GLOSSARY)
    terms = re.findall(r"^\*\*(.+?)\*\* · ", GLOSSARY, re.MULTILINE)
    assert not [term for term in terms if words_of(term) in bans]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_names_and_log_messages_use_the_glossarys_words(package: Path) -> None:
    bans = banned(GLOSSARY)
    found = [
        offence
        for file in SOURCES
        if file.is_relative_to(package)
        for offence in offences(file.read_text(), shown(file), bans)
    ]
    assert not found, "\n".join(["banned words:", *found])


def test_every_exemption_is_needed() -> None:
    bans = banned(GLOSSARY)
    for end, exempt in EXEMPT:
        files = [file for file in SOURCES if shown(file).endswith(end)]
        names = {name for file in files for name, _ in identifiers(ast.parse(file.read_text()))}
        assert exempt in names, f"{end} has no {exempt}"
        words = words_of(exempt)
        assert any(words[at : at + len(ban)] == ban for ban in bans for at in range(len(words))), exempt
