"""The directory of files by itself: room, leftovers, links, damage, and time."""

import fcntl
import os
from pathlib import Path

import pytest

from triptych_common.domain.errors import RequestError
from triptych_common.domain.hashing import media_digest
from triptych_common.protocol.messages import Modality
from triptych_common.runtime import RunDirError
from triptych_gateway.files.file_record import NS_PER_S, FileRecord
from triptych_gateway.files.file_store import FileStore, NewFile
from triptych_gateway.files.partial_file import ClosedFileError
from triptych_gateway.settings import FileSettings

ALICE, BOB = "a" * 32, "b" * 32
LIMITS = FileSettings(
    files_max_file_bytes=100, files_max_bytes=1000, files_max_files=5, files_max_key_bytes=300,
    files_max_key_files=3, files_lifetime_s=60, files_max_lifetime_s=600,
)  # fmt: skip
START_S = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.seconds = START_S

    def __call__(self) -> int:
        return self.seconds * NS_PER_S


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> FileStore:
    return FileStore(tmp_path / "files", LIMITS, clock)


def keep(store: FileStore, owner: str, content: bytes = b"content", lifetime_s: int = 60) -> FileRecord:
    partial = store.begin_file(owner, len(content))
    partial.write(content)
    return store.keep_file(owner, partial, NewFile("a", "vision", lifetime_s, (Modality.VIDEO,), None))


def refused(store: FileStore, owner: str, num_announced: int | None = 10) -> str:
    with pytest.raises(RequestError) as raised:
        store.begin_file(owner, num_announced)
    return raised.value.code


def test_a_file_is_there_for_its_owner_alone(store: FileStore) -> None:
    record = keep(store, ALICE)
    assert record.media_digest == media_digest(b"content")
    assert store.find_file(ALICE, record.file_id) == record
    assert store.read_content(ALICE, record) == b"content"
    assert store.list_files(ALICE) == [record]
    assert store.find_file(BOB, record.file_id) is None
    assert store.list_files(BOB) == []
    assert not store.delete_file(BOB, record.file_id)
    assert store.delete_file(ALICE, record.file_id)
    assert not store.delete_file(ALICE, record.file_id)
    with pytest.raises(RequestError) as raised:
        store.read_content(ALICE, record)
    assert raised.value.code == "file_not_found"


def test_room_is_held_from_the_start_of_an_upload(store: FileStore, tmp_path: Path, clock: Clock) -> None:
    other = FileStore(tmp_path / "files", LIMITS, clock)  # another gateway
    held = [store.begin_file(ALICE, None) for _ in range(3)]
    assert refused(other, ALICE) == "file_quota_exceeded"
    held.append(other.begin_file(BOB, 10))
    held.append(other.begin_file(BOB, 10))
    assert refused(store, BOB) == "files_full"
    assert other.use().num_bytes == 320
    for partial in held:
        partial.discard()
    assert store.use().num_files == 0


def test_an_upload_writes_no_more_than_it_holds(store: FileStore) -> None:
    partial = store.begin_file(ALICE, 10)
    partial.write(b"x" * 10)
    with pytest.raises(RequestError) as raised:
        partial.write(b"x")
    assert raised.value.code == "file_too_large"
    partial.discard()
    partial.discard()
    with pytest.raises(ClosedFileError):
        partial.write(b"x")


def test_expired_files_are_gone_and_their_room_is_free(store: FileStore, clock: Clock) -> None:
    short, long = keep(store, ALICE, lifetime_s=10), keep(store, ALICE, lifetime_s=20)
    assert store.remove_expired(10) == (0, START_S + 10)
    clock.seconds += 10
    assert store.find_file(ALICE, short.file_id) is None
    assert store.list_files(ALICE) == [long]
    assert not store.delete_file(ALICE, short.file_id)
    assert store.remove_expired(10) == (1, START_S + 20)
    clock.seconds += 10
    assert store.remove_expired(10) == (1, None)
    assert store.use().num_files == 0


def test_room_of_expired_files_is_free_before_a_sweep(store: FileStore, clock: Clock) -> None:
    for _ in range(3):
        keep(store, ALICE, lifetime_s=10)
    assert refused(store, ALICE) == "file_quota_exceeded"
    clock.seconds += 10
    store.begin_file(ALICE, 10).discard()
    assert store.use().num_files == 0


def test_a_sweep_removes_so_many_at_once(store: FileStore, clock: Clock) -> None:
    for _ in range(3):
        keep(store, ALICE, lifetime_s=10)
    clock.seconds += 10
    assert store.remove_expired(2) == (2, START_S + 10)
    assert store.remove_expired(2) == (1, None)


def test_a_copied_record_keeps_its_own_time(store: FileStore, tmp_path: Path, clock: Clock) -> None:
    record = keep(store, ALICE)
    path = tmp_path / "files" / ALICE / f"{record.file_id}.json"
    os.utime(path, (START_S - 5, START_S - 5))
    assert store.remove_expired(10) == (0, record.expires_at)
    assert path.stat().st_mtime == record.expires_at


def test_what_was_left_over_is_removed_and_what_lives_is_not(store: FileStore, tmp_path: Path) -> None:
    record, living = keep(store, ALICE), store.begin_file(ALICE, 10)
    folder = tmp_path / "files" / ALICE
    dead = [folder / f".{'0' * 32}.100.part", folder / f"file-{'0' * 32}.bin", folder / ".x.tmp"]
    for path in dead:
        path.touch()
    assert store.use().num_files == 2
    assert not any(path.exists() for path in dead)
    living.write(b"x")
    assert store.find_file(ALICE, record.file_id) == record
    living.discard()


def test_links_are_not_followed(store: FileStore, tmp_path: Path) -> None:
    record = keep(store, ALICE)
    secret = tmp_path / "secret"
    secret.write_bytes(b"content")
    content = tmp_path / "files" / ALICE / f"{record.file_id}.bin"
    content.unlink()
    content.symlink_to(secret)
    with pytest.raises(RequestError) as raised:
        store.read_content(ALICE, record)
    assert raised.value.code == "file_storage_failed"
    described = content.with_suffix(".json")
    described.rename(tmp_path / "moved.json")
    described.symlink_to(tmp_path / "moved.json")
    assert store.find_file(ALICE, record.file_id) is None


@pytest.mark.parametrize("damage", [b"CONTENT", b"conten", b"contents", b""])
def test_other_bytes_are_never_served_as_the_files(store: FileStore, tmp_path: Path, damage: bytes) -> None:
    record = keep(store, ALICE)
    (tmp_path / "files" / ALICE / f"{record.file_id}.bin").write_bytes(damage)
    with pytest.raises(RequestError) as raised:
        store.read_content(ALICE, record)
    assert raised.value.code == "file_storage_failed"


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"version": 2}', "x" * 100_000])
def test_a_record_that_cannot_be_read_is_no_file(store: FileStore, tmp_path: Path, text: str) -> None:
    record = keep(store, ALICE)
    (tmp_path / "files" / ALICE / f"{record.file_id}.json").write_text(text)
    assert store.find_file(ALICE, record.file_id) is None
    assert store.list_files(ALICE) == []
    assert store.use().num_files == 1  # it keeps its room until an operator has looked


def test_a_record_under_another_id_is_no_file(store: FileStore, tmp_path: Path) -> None:
    record = keep(store, ALICE)
    other = f"file-{'0' * 32}"
    (tmp_path / "files" / ALICE / f"{record.file_id}.json").rename(
        tmp_path / "files" / ALICE / f"{other}.json"
    )
    assert store.find_file(ALICE, other) is None


def test_a_failed_step_leaves_nothing(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    partial = store.begin_file(ALICE, 10)
    partial.write(b"x")
    monkeypatch.setattr("triptych_gateway.files.file_store._write_record", refuse)
    with pytest.raises(OSError, match="No space"):
        store.keep_file(ALICE, partial, NewFile("a", "vision", 60, (Modality.VIDEO,), None))
    partial.discard()
    assert list((tmp_path / "files" / ALICE).iterdir()) == []


def test_a_folder_that_cannot_be_written_to_the_disk_keeps_no_file(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("triptych_gateway.files.file_store._sync_folder", refuse)
    with pytest.raises(OSError, match="Input/output"):
        keep(store, ALICE)
    assert store.list_files(ALICE) == []
    assert store.use().num_files == 0
    assert not [path for path in (tmp_path / "files" / ALICE).iterdir() if path.suffix != ".part"]


def test_folders_are_written_to_the_disk_also_the_root(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("triptych_gateway.files.file_store._sync_folder", synced.append)
    keep(store, ALICE)
    assert set(synced) == {tmp_path / "files" / ALICE, tmp_path / "files"}


def test_an_upload_that_is_discarded_while_it_is_kept_is_whole_or_not_there(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = NewFile("a", "vision", 60, (Modality.VIDEO,), None)
    partial = store.begin_file(ALICE, 10)
    partial.write(b"content")
    with monkeypatch.context() as patched:  # right after it got its name
        patched.setattr("triptych_gateway.files.file_store._sync_folder", lambda _: partial.discard())
        record = store.keep_file(ALICE, partial, new)
    assert store.read_content(ALICE, record) == b"content"
    late = store.begin_file(ALICE, 10)
    late.write(b"content")
    monkeypatch.setattr(late, "sync", late.discard)  # just before
    with pytest.raises(ClosedFileError):
        store.keep_file(ALICE, late, new)
    assert store.list_files(ALICE) == [record]
    assert len(list((tmp_path / "files" / ALICE).iterdir())) == 2


def test_a_record_without_its_bytes_is_removed(store: FileStore, tmp_path: Path) -> None:
    record = keep(store, ALICE)
    (tmp_path / "files" / ALICE / f"{record.file_id}.bin").unlink()
    assert store.use().num_files == 0
    assert list((tmp_path / "files" / ALICE).iterdir()) == []


def test_a_lock_that_another_holds_for_long_is_given_up(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.use()
    monkeypatch.setattr("triptych_gateway.files.file_store.LOCK_TIMEOUT_S", 0.05)
    with (tmp_path / "files" / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError):
            store.use()
    store.use()


def test_a_record_is_written_whole_however_little_the_disk_takes_at_once(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    record = keep(store, ALICE)
    assert store.find_file(ALICE, record.file_id) == record
    assert store.read_content(ALICE, record) == b"content"


def test_a_record_that_the_disk_refuses_is_not_said_to_be_no_file(
    store: FileStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = keep(store, ALICE), keep(store, ALICE)
    read = os.open

    def refuse(path: Path, *rest: int) -> int:
        if str(path).endswith(f"{first.file_id}.json"):
            raise OSError(24, "Too many open files")
        return read(path, *rest)

    monkeypatch.setattr(os, "open", refuse)
    for step in (store.find_file, store.delete_file):
        with pytest.raises(OSError, match="Too many"):
            step(ALICE, first.file_id)
    assert store.list_files(ALICE) == [second]
    clock.seconds += 60
    assert store.remove_expired(10) == (1, None)


def test_a_directory_that_is_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(RunDirError, match="directory of files"):
        FileStore(tmp_path / "open", LIMITS)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(RunDirError):
        FileStore(tmp_path / "link", LIMITS)
