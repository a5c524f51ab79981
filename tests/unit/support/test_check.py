"""`./triptych check --changed` takes the steps that the changed files touch."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import check

NEW = "services/gateway/src/triptych_gateway/routing/new_module.py"


def test_a_changed_module_has_its_package_and_its_tests_checked() -> None:
    found = dict(check.steps_for(["libs/cli/src/triptych_cli/commands/bench.py", "docs/development.md"]))
    assert found.keys() == {"lint", "format", "types", "imports", "tests"}
    assert found["lint"][-1] == found["format"][-1] == "libs/cli/src/triptych_cli/commands/bench.py"
    assert found["types"][-3:] == ["libs/cli/src/triptych_cli", *check.TYPED]
    assert found["tests"][-1] == "tests/unit/cli/commands/test_bench.py"


def test_a_changed_helper_of_tests_has_all_tests_type_checked() -> None:
    found = dict(check.steps_for(["tests/support/waiting.py"]))
    assert found["types"][-2:] == list(check.TYPED) == ["benchmarks", "tests"]


def test_the_nearest_folder_stands_for_a_module_without_a_test_of_its_name() -> None:
    assert check.tests_of(NEW) == ["tests/unit/gateway/routing"]
    assert check.tests_of("libs/cli/src/triptych_cli/nowhere/new_module.py") == ["tests/unit/cli"]


def test_a_changed_test_is_run_if_it_is_quick() -> None:
    assert check.tests_of("tests/unit/cli/test_help.py") == ["tests/unit/cli/test_help.py"]
    assert check.tests_of("tests/engine/test_files.py") == []
    assert check.tests_of("tests/conftest.py") == []


def test_documents_alone_need_no_step() -> None:
    assert check.steps_for(["README.md"]) == []


def test_changed_files_are_those_since_the_branch_left_main_and_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def write(*names: str) -> None:
        for name in names:
            (tmp_path / name).write_text(name)

    for name in [each for each in os.environ if each.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(check, "CHECKOUT", tmp_path)
    git("init", "-q", "-b", "main")
    write("old.py", "gone.py", "edited.py")
    git("add", ".")
    git("commit", "-qm", "first")
    git("checkout", "-qb", "branch")
    write("committed.py")
    git("add", ".")
    git("rm", "-q", "gone.py")
    git("commit", "-qm", "second")
    write("new.py")
    (tmp_path / "edited.py").write_text("other")
    assert check.changed_files() == ["committed.py", "edited.py", "new.py"]
