"""Documents name commands of `./triptych` that exist, with options that they have."""

import re
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from tests.contract.test_docs import DOCS, ROOT
from triptych_cli.app import app

COMMAND = re.compile(r"\./triptych ([a-z][^`#\n|]*)")


def fault(line: str) -> str | None:
    """Return the faults of the words behind `./triptych`."""
    words, node = line.split(), typer.main.get_command(app)
    while isinstance(node, TyperGroup) and words and re.fullmatch("[a-z-]+", words[0]):
        if words[0] not in node.commands:
            return f"no command {words[0]}"
        node, words = node.commands[words[0]], words[1:]
    if isinstance(node, TyperGroup) or node.context_settings.get(
        "allow_extra_args"
    ):  # options go to another program
        return None
    options = {option for each in node.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
    unknown = {re.split("[=…]", word)[0] for word in words if word.startswith("--")} - options
    return f"no option {sorted(unknown)}" if unknown else None


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))
def test_commands_and_options_exist(doc: Path) -> None:
    lines = [re.sub('"[^"]*"', "x", each) for each in COMMAND.findall(doc.read_text().replace("\\\n", " "))]
    assert not {line: fault(line) for line in lines if fault(line) is not None}


def test_a_command_or_an_option_that_does_not_exist_is_found() -> None:
    assert fault("upp") == "no command upp"
    assert fault("up --modle x") == "no option ['--modle']"
    assert fault("up --model x") is None
