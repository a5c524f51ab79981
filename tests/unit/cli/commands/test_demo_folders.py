"""The folders of `demo`: which ones it clears, and which ones it leaves alone."""

import os
import tempfile
from pathlib import Path

import pytest

from triptych_cli.commands import demo
from triptych_cli.commands.demo import private_layout, sweep

LONG_AGO = (1.0, 1.0)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Beside the run directory that the user named; temporary files are elsewhere."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TRIPTYCH_RUN_DIR", str(tmp_path / "place" / "run"))
    return tmp_path / "place"


def killed_demo(base: Path) -> Path:
    """The run directory that a demo which was killed has left."""
    folder = base / "triptych-demo-killed"
    folder.mkdir(parents=True)
    (folder / "supervisor.lock").touch()
    return folder


def old_logs() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="triptych-demo-logs-"))
    os.utime(folder, LONG_AGO)
    return folder


def test_folders_are_beside_the_run_directory_and_vanish(base: Path) -> None:
    with private_layout() as layout:
        assert layout.run_dir.parent == base
        assert layout.run_dir.stat().st_mode & 0o077 == 0
    assert not layout.run_dir.exists()
    assert not layout.state_dir.exists()


def test_what_killed_demos_left_is_cleared(base: Path) -> None:
    left = [killed_demo(base), old_logs()]
    sweep()
    assert not any(folder.exists() for folder in left)


def test_a_living_demo_keeps_its_folders(base: Path) -> None:
    with private_layout() as layout:
        os.utime(layout.state_dir, LONG_AGO)
        sweep()
        assert layout.run_dir.exists()
        assert layout.state_dir.exists()


def test_folders_of_other_users_are_left_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [killed_demo(base), old_logs()]
    uid = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setattr(demo, "is_supervised", lambda _: pytest.fail("looked into"))
    sweep()
    assert all(folder.exists() for folder in left)
