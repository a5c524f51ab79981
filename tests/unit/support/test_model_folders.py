"""Folders that are made once."""

from pathlib import Path

import pytest

from tests.support.model_folders import made_once


def write(folder: Path, text: str = "{}") -> None:
    folder.mkdir()
    (folder / "config.json").write_text(text)


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    made = made_once(tmp_path / "below" / "model", write)
    assert (made / "config.json").is_file()
    assert made_once(made, lambda _: pytest.fail("made again")) == made


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        made_once(tmp_path / "model", fail)
    assert not list(tmp_path.iterdir())


def test_of_two_that_are_made_at_once_one_stays(tmp_path: Path) -> None:
    def write_after_another(folder: Path) -> None:
        write(folder, "mine")
        write(tmp_path / "model", "theirs")

    made = made_once(tmp_path / "model", write_after_another)
    assert (made / "config.json").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [made]
