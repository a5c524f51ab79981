"""What an environment is made from, and when it is made anew."""

import subprocess
from pathlib import Path

import pytest

from triptych_cli import bootstrap
from triptych_cli.settings import CHECKOUT


def write_member(root: Path, folder: str, text: str) -> None:
    file = root / folder / "pyproject.toml"
    file.parent.mkdir(parents=True)
    file.write_text(
        f'[build-system]\nrequires = ["hatchling>=1"]\n[project]\nname = "{file.parent.name}"\n{text}'
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "constraints.txt").write_text("x==1\n")
    write_member(
        tmp_path,
        "libs/common",
        'dependencies = ["orjson"]\n'
        '[project.optional-dependencies]\ndev = ["pytest"]\ncpu = ["v-cpu"]\ncuda = ["v"]\n',
    )
    write_member(tmp_path, "services/gateway", 'dependencies = ["triptych-common", "fastapi", "orjson"]\n')
    return tmp_path


def test_requirements_are_what_the_members_need_from_outside(checkout: Path) -> None:
    assert bootstrap.requirements(checkout, "cpu") == ["fastapi", "orjson", "pytest", "v-cpu"]
    assert bootstrap.requirements(checkout, "cuda") == ["fastapi", "orjson", "pytest", "v"]


def test_the_build_backend_is_installed_once_with_what_editable_installs_need(checkout: Path) -> None:
    assert bootstrap.build_requirements(checkout) == ["editables", "hatchling>=1"]


@pytest.mark.parametrize(
    "file", ["constraints.txt", "libs/common/pyproject.toml", "services/gateway/pyproject.toml"]
)
def test_the_recipe_changes_with_each_of_its_files(checkout: Path, file: str) -> None:
    before = bootstrap.recipe(checkout)
    with (checkout / file).open("a") as handle:
        handle.write("\n# changed\n")
    assert bootstrap.recipe(checkout) != before


def test_the_launcher_and_the_bootstrap_read_the_same_recipe() -> None:
    text = (CHECKOUT / "triptych").read_text()
    body = text[text.index("recipe() (") : text.index("\n)\n") + 3]
    shell = subprocess.run(
        ["sh", "-c", f"root=$1; LC_ALL=C; {body} recipe", "sh", str(CHECKOUT)],
        check=True,
        capture_output=True,
    )
    assert shell.stdout == bootstrap.recipe(CHECKOUT)


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    with pytest.raises(bootstrap.SetupError, match="TRIPTYCH_VENV"), bootstrap.exclusive(tmp_path):
        pass
    assert (tmp_path / "precious").exists()


def test_a_finished_environment_is_not_made_again(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "triptych-recipe").write_bytes(bootstrap.recipe(checkout))
    (venv / "pyvenv.cfg").touch()
    monkeypatch.setattr(bootstrap, "set_up", lambda *_: pytest.fail("set up again"))
    assert bootstrap.main(checkout, venv) == 0


def test_a_failed_step_says_so_and_leaves_no_recipe(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    venv = tmp_path / "venv"
    monkeypatch.setattr(bootstrap, "make_venv", lambda installer, venv, tick: False)
    monkeypatch.setattr(bootstrap, "detect_engine", lambda override: "cpu")
    assert bootstrap.main(checkout, venv) == 1
    assert not (venv / "triptych-recipe").exists()
    assert "the step 'Python environment' failed" in capsys.readouterr().err


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(bootstrap.SetupError, match="cpu or cuda"):
        bootstrap.detect_engine("tpu")


def test_constraints_are_exact_and_name_no_place() -> None:
    for line in (CHECKOUT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            assert line.count("==") == 1, line
            assert "/" not in line
            assert "@" not in line
