"""A log in several files: no line is lost or cut, and the files are bounded."""

import os
from pathlib import Path

import pytest

from triptych_cli.supervisor.rotating_log import (
    CHUNK_BYTES,
    NUM_FILES,
    LogPipe,
    RotatingLog,
    older_log,
    shift_logs,
)

MAX_BYTES = 4000


def pieces(file: Path) -> list[bytes]:
    """What the files hold, the oldest first."""
    files = [*(older_log(file, number) for number in reversed(range(1, NUM_FILES))), file]
    return [each.read_bytes() for each in files if each.exists()]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 1000, 2000])
def test_no_line_is_lost_or_cut(tmp_path: Path, chunk_bytes: int) -> None:
    file = tmp_path / "one.log"
    log = RotatingLog(file, MAX_BYTES)
    whole = b"".join(b"line %d\n" % number for number in range(300))
    for start in range(0, len(whole), chunk_bytes):
        log.write(whole[start : start + chunk_bytes])
    log.close()
    found = pieces(file)
    assert len(found) > 1
    assert b"".join(found) == whole
    assert all(each.endswith(b"\n") for each in found)


def test_the_oldest_go(tmp_path: Path) -> None:
    file = tmp_path / "one.log"
    log = RotatingLog(file, MAX_BYTES)
    for number in range(10_000):
        log.write(b"line %d\n" % number)
    log.close()
    assert len(pieces(file)) == len(list(tmp_path.iterdir())) == NUM_FILES
    assert sum(map(len, pieces(file))) <= MAX_BYTES + NUM_FILES * len(b"line 9999\n")
    assert pieces(file)[-1].endswith(b"line 9999\n")


def test_a_line_without_an_end_is_bounded_too(tmp_path: Path) -> None:
    file = tmp_path / "one.log"
    log = RotatingLog(file, MAX_BYTES)
    for _ in range(1000):
        log.write(b"x" * 100)
    log.close()
    assert sum(map(len, pieces(file))) <= 2 * MAX_BYTES + NUM_FILES * 100


def test_it_goes_on_where_the_file_ends(tmp_path: Path) -> None:
    file = tmp_path / "one.log"
    for _ in range(2):
        log = RotatingLog(file, MAX_BYTES)
        log.write(b"x" * 499 + b"\n")
        log.close()
    assert [len(each) for each in pieces(file)] == [1000]
    more = RotatingLog(file, MAX_BYTES)
    more.write(b"a\n")
    more.write(b"b\n")
    more.close()
    assert pieces(file)[-1] == b"b\n"


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    log = RotatingLog(tmp_path / "gone" / "one.log", MAX_BYTES)
    assert log.write(b"x\n") == 2
    log.close()


def test_a_new_run_keeps_the_logs_before(tmp_path: Path) -> None:
    file = tmp_path / "one.log"
    for number in range(NUM_FILES + 1):
        file.write_bytes(b"%d" % number)
        shift_logs(file)
    assert not file.exists()
    assert pieces(file) == [b"2", b"3", b"4"]


def test_what_is_written_before_the_end_is_there(tmp_path: Path) -> None:
    log = RotatingLog(tmp_path / "one.log", 1 << 30)
    pipe = LogPipe(log)
    data = b"x" * (3 * CHUNK_BYTES)
    os.write(pipe.writing, data)
    pipe.close_writing()
    pipe.wait_end(60)
    assert log.file.read_bytes() == data
    open_files = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    assert str(log.file) not in open_files, "the file is closed until a restarted service writes"
    log.write(b"y")
    log.close()
    assert log.file.read_bytes() == data + b"y"
