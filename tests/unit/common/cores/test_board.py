"""The board of one host, with all its engines in one process: slots, words, files that are no board."""

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from triptych_common.cores.board import (
    MAX_CORES,
    NUM_SLOTS,
    SLOT_BYTES,
    CoreBoard,
    CoreBoardError,
    board_path,
)
from triptych_common.cores.sharing import Work


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return board_path(tmp_path / "store.sock")


@pytest.fixture
def boards(path: Path) -> Iterator[tuple[CoreBoard, CoreBoard]]:
    with closing(CoreBoard.open(path, [0])) as first, closing(CoreBoard.open(path, [1, 2])) as second:
        yield first, second


def seen(board: CoreBoard) -> list[tuple[Work, set[int], Work]]:
    return [(load.work, set(load.cores), load.before) for load in board.others()]


def test_engines_see_each_other_and_not_themselves(boards: tuple[CoreBoard, CoreBoard]) -> None:
    first, second = boards
    assert first.others() == []  # what has not worked yet keeps no core
    second.publish(Work.ENCODE)
    assert seen(first) == [(Work.ENCODE, {1, 2}, Work.IDLE)]
    assert second.others() == []
    second.publish(Work.IDLE)
    assert seen(first) == [(Work.IDLE, {1, 2}, Work.ENCODE)]


def test_times_are_those_of_the_last_change(boards: tuple[CoreBoard, CoreBoard]) -> None:
    first, second = boards
    second.publish(Work.DECODE)
    [before] = first.others()
    second.publish(Work.IDLE)
    [after] = first.others()
    assert 0 < before.since_ns <= after.since_ns


def test_an_engine_that_left_is_not_seen_and_its_slot_is_taken(path: Path) -> None:
    with closing(CoreBoard.open(path, [0])) as first:
        second = CoreBoard.open(path, [1, 2])
        second.publish(Work.ENCODE)
        second.close()
        second.close()
        assert first.others() == []
        with closing(CoreBoard.open(path, [255])) as third:
            assert first.others() == []
            third.publish(Work.PREFILL)
            assert seen(first) == [(Work.PREFILL, {255}, Work.IDLE)]


def test_file_is_for_its_user_alone(path: Path, boards: tuple[CoreBoard, CoreBoard]) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == SLOT_BYTES * (1 + NUM_SLOTS)


def test_words_that_no_engine_writes_are_not_believed(
    path: Path, boards: tuple[CoreBoard, CoreBoard]
) -> None:
    first, second = boards
    second.publish(Work.ENCODE)
    with path.open("r+b") as file:
        file.seek(SLOT_BYTES * 2)
        file.write(b"\xff" * SLOT_BYTES)
    assert first.others() == []


def test_full_board(path: Path) -> None:
    boards = [CoreBoard.open(path, [0]) for _ in range(NUM_SLOTS)]
    with pytest.raises(CoreBoardError, match="no free slot"):
        CoreBoard.open(path, [0])
    for board in boards:
        board.close()
    CoreBoard.open(path, [0]).close()


def test_file_of_another_version(path: Path) -> None:
    """Of another size or not: it stays as it is, since others use it."""
    for num_slots in (1, NUM_SLOTS, 2 * NUM_SLOTS):
        content = (b"tripcore\x63\0\0\0").ljust(SLOT_BYTES * (1 + num_slots), b"\1")
        path.write_bytes(content)
        with pytest.raises(CoreBoardError, match="another version"):
            CoreBoard.open(path, [0])
        assert path.read_bytes() == content


def test_every_byte_has_its_memory(path: Path, boards: tuple[CoreBoard, CoreBoard]) -> None:
    """A write to a hole ends the process when the file system is full."""
    assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_full_file_system(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as filled:
        filled.setattr(os, "posix_fallocate", full)
        with pytest.raises(CoreBoardError, match="No space left"):
            CoreBoard.open(path, [0])
    CoreBoard.open(path, [0]).close()


def test_path_that_is_no_file(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CoreBoardError, match="cannot be opened"):
        CoreBoard.open(path, [0])
    assert not (tmp_path / "elsewhere").exists()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CoreBoardError, match="not a file"):
        CoreBoard.open(path, [0])


def test_core_that_has_no_bit(path: Path) -> None:
    with pytest.raises(CoreBoardError, match="cannot be shared"):
        CoreBoard.open(path, [0, MAX_CORES])
    assert not path.exists()
