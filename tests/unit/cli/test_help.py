"""Help and version need no environment; `tests/contract/test_help.py` has the texts."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from triptych_cli import bootstrap
from triptych_cli.app import app
from triptych_cli.settings import CHECKOUT

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_plain_help_names_every_command() -> None:
    shown = bootstrap.plain_help(CHECKOUT)
    expected = {name for name, each in COMMANDS.items() if not each.hidden and not hasattr(each, "commands")}
    assert {line.split()[0] for line in shown.splitlines() if line.startswith("  ")} == expected


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], [], ["up", "--help"], ["--version"]])
def test_the_launcher_answers_without_an_environment(tmp_path: Path, arguments: list[str]) -> None:
    venv = tmp_path / "venv"
    done = subprocess.run(
        [str(CHECKOUT / "triptych"), *arguments], env={"PATH": "/usr/bin:/bin", "TRIPTYCH_VENV": str(venv),
        "TRIPTYCH_PYTHON": sys.executable}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert not venv.exists()
    assert done.stderr == ""
    version = CliRunner().invoke(app, ["--version"]).output
    assert done.stdout == version if arguments == ["--version"] else "  up " in done.stdout


def test_ctrl_c_during_the_imports_prints_no_traceback() -> None:
    code = (
        "import os, runpy, signal, sys\n"
        "class Presses:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'triptych_cli.app':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Presses())\n"
        "runpy.run_module('triptych_cli', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "status"], capture_output=True, text=True, check=False)
    assert done.returncode == -2
    assert done.stderr == ""
