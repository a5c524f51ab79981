"""Directory of uploaded files. Every method blocks, and is called in threads.

    {root}/lock                         held while room is given out and while a file gets its name
    {root}/{owner}/.{token}.{n}.part    is being written (`partial_file`)
    {root}/{owner}/{file_id}.bin        its bytes
    {root}/{owner}/{file_id}.json       its record; the file exists as long as this does

A file appears with its record, and goes with it, each in one step. A folder holds one API key's files, so a
path that is made for one key never leads to another's. All of it is private to the user, and no link is
followed. Nothing is kept in memory: another gateway may add and delete at any time.
"""

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from pydantic import ValidationError

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import Modality
from triptych_common.runtime import ensure_run_dir
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.errors import unavailable
from triptych_gateway.files.directory_use import (
    CONTENT_SUFFIX,
    RECORD_SUFFIX,
    TEMPORARY_SUFFIX,
    DirectoryUse,
    Use,
    expiries,
    measure,
)
from triptych_gateway.files.file_record import (
    MAX_RECORD_BYTES,
    NS_PER_S,
    FileRecord,
    Purpose,
    is_file_id,
    new_file_id,
)
from triptych_gateway.files.partial_file import CREATE, EXISTING, PRIVATE, PartialFile, read_all
from triptych_gateway.request.image_header import ImageHeader
from triptych_gateway.settings import FileSettings

log = get_logger(__name__)

LOCK_NAME = "lock"
LOCK_TIMEOUT_S = 10.0
LOCK_RETRY_S = 0.005
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class NewFile:
    """Facts about a complete upload."""

    filename: str
    purpose: Purpose
    lifetime_s: int
    modalities: tuple[Modality, ...]
    image: ImageHeader | None


class FileStore:
    """Store of one gateway; several may share the directory, on a host or a file system that locks."""

    def __init__(self, root: Path, limits: FileSettings, now_ns: Callable[[], int] = time.time_ns) -> None:
        """Open the directory. Raises RunDirError: it cannot be made, or other users can read it."""
        ensure_run_dir(root, "directory of files")
        self._root = root
        self.limits = limits
        self._now_ns = now_ns

    # ---- uploads ---------------------------------------------------------------------------------
    def begin_file(self, owner: str, num_announced: int | None) -> PartialFile:
        """Reserve room for one more file of `owner`, until it is kept or discarded.

        Args:
            num_announced: announced size of the body; None: as many bytes as a file may have.

        Raises:
            RequestError: 403 the key has no more room, 503 none has.
            OSError: the disk.
        """
        limits = self.limits
        wanted = limits.max_file_bytes if num_announced is None else num_announced
        wanted = min(wanted, limits.max_file_bytes)
        with self._locked():
            use = self._measure()
            own = use.of(owner)
            if (
                own.num_files >= limits.files_max_key_files
                or own.num_bytes + wanted > limits.files_max_key_bytes
            ):
                message = (
                    f"the files of this API key would be more than {limits.files_max_key_files},"
                    f" or more than {limits.files_max_key_bytes} bytes; delete some"
                )
                raise RequestError(403, "file_quota_exceeded", message, "file")
            if (
                use.total.num_files >= limits.files_max_files
                or use.total.num_bytes + wanted > limits.files_max_bytes
            ):
                raise unavailable("files_full", "there is no room for more files; try again later", "file")
            folder = self._root / owner
            folder.mkdir(mode=0o700, exist_ok=True)
            return PartialFile(folder, wanted)

    def keep_file(self, owner: str, partial: PartialFile, new: NewFile) -> FileRecord:
        """Keep a complete file, which lasts from now on, also after a crash.

        Raises:
            OSError: the disk, or the upload has ended meanwhile. Nothing of the file is kept.
        """
        now_ns = self._now_ns()
        image = new.image
        record = FileRecord(
            file_id=new_file_id(now_ns),
            filename=new.filename,
            purpose=new.purpose,
            num_bytes=partial.num_bytes,
            created_ns=now_ns,
            expires_at=now_ns // NS_PER_S + new.lifetime_s,
            media_digest=partial.media_digest,
            modalities=new.modalities,
            image=None if image is None else image.properties,
        )
        folder = self._root / owner
        content, described = self._paths(owner, record.file_id)
        temporary = folder / f".{record.file_id}{TEMPORARY_SUFFIX}"
        partial.sync()
        with self._locked():  # else it would look like something that was left over
            try:
                _write_record(temporary, record)
                partial.keep_as(content)
                temporary.rename(described)
                _sync_folder(folder)
                _sync_folder(self._root)  # the owner's folder may be new
            except BaseException:
                for path in (described, temporary, content):  # the record first: without it there is no file
                    with suppress(OSError):
                        path.unlink(missing_ok=True)
                raise
        return record

    # ---- files -----------------------------------------------------------------------------------
    def find_file(self, owner: str, file_id: str) -> FileRecord | None:
        """Return the owner's record of a file; None if it is missing or expired. Raises OSError: the disk."""
        if not is_file_id(file_id):
            return None
        record = _read_record(self._paths(owner, file_id)[1])
        return None if record is None or self._is_over(record) else record

    def list_files(self, owner: str) -> list[FileRecord]:
        """Return all readable records of this owner, in no order. Raises OSError: the disk, of the folder."""
        try:
            paths = list((self._root / owner).iterdir())
        except FileNotFoundError:
            return []
        found = []
        for path in paths:
            if path.suffix != RECORD_SUFFIX:
                continue
            try:
                record = self.find_file(owner, path.stem)
            except OSError as error:
                _log_unread(path, error)
                continue
            if record is not None:
                found.append(record)
        return found

    def delete_file(self, owner: str, file_id: str) -> bool:
        """Delete a file; return False if it is missing."""
        if self.find_file(owner, file_id) is None:
            return False
        content, described = self._paths(owner, file_id)
        try:
            described.unlink()
        except FileNotFoundError:
            return False
        content.unlink(missing_ok=True)
        return True

    def open_content(self, owner: str, record: FileRecord) -> int:
        """Open the file's bytes and return the descriptor; close it.

        Raises:
            RequestError: 404, it was deleted meanwhile.
            OSError: the disk.
        """
        try:
            fd = os.open(self._paths(owner, record.file_id)[0], EXISTING)
        except FileNotFoundError as error:
            raise file_not_found(record.file_id) from error
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size != record.num_bytes:
            os.close(fd)
            raise _damaged(record)
        return fd

    def read_content(self, owner: str, record: FileRecord) -> bytes:
        """Return the file's bytes as uploaded.

        Raises:
            RequestError: 404, it was deleted meanwhile; 503, it cannot be read.
        """
        try:
            fd = self.open_content(owner, record)
            try:
                content = read_all(fd, record.num_bytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise storage_failed(error) from error
        if blake3(content).hexdigest() != record.media_digest:
            raise _damaged(record)
        return content

    # ---- upkeep ----------------------------------------------------------------------------------
    def use(self) -> Use:
        """Measure the use of the directory and remove what dead gateways left."""
        with self._locked():
            return measure(self._root).total

    def remove_expired(self, max_files: int) -> tuple[int, float | None]:
        """Remove expired files, `max_files` at most.

        Returns:
            (number of files, Unix seconds at which the next is due; None: there are no files)
        """
        num_removed, next_at = 0, None
        for described, due_at in expiries(self._root):
            if due_at > self._now_ns() / NS_PER_S or num_removed == max_files:
                next_at = due_at if next_at is None else min(next_at, due_at)
                continue
            try:
                record = _read_record(described)
            except OSError as error:
                _log_unread(described, error)
                continue
            if record is None:  # deleted meanwhile, or not ours to judge
                continue
            if self._is_over(record):
                described.unlink(missing_ok=True)
                described.with_suffix(CONTENT_SUFFIX).unlink(missing_ok=True)
                num_removed += 1
            else:  # copied from elsewhere, without its time
                with suppress(FileNotFoundError):
                    os.utime(described, (record.expires_at, record.expires_at))
                next_at = record.expires_at if next_at is None else min(next_at, record.expires_at)
        return num_removed, next_at

    # ---- parts -----------------------------------------------------------------------------------
    def _measure(self) -> DirectoryUse:
        self.remove_expired(self.limits.files_max_files)
        return measure(self._root)

    def _paths(self, owner: str, file_id: str) -> tuple[Path, Path]:
        folder = self._root / owner
        return folder / f"{file_id}{CONTENT_SUFFIX}", folder / f"{file_id}{RECORD_SUFFIX}"

    def _is_over(self, record: FileRecord) -> bool:
        return record.expires_at * NS_PER_S <= self._now_ns()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self._root / LOCK_NAME, _LOCK, PRIVATE)
        try:
            _lock(fd, time.monotonic() + LOCK_TIMEOUT_S)
            yield
        finally:
            os.close(fd)


def file_not_found(file_id: str, param: str | None = "file_id") -> RequestError:
    """Return the 404 for a file that is missing, expired, or another API key's."""
    return RequestError(404, "file_not_found", f"there is no file {file_id[:100]!r}", param)


def storage_failed(error: OSError) -> RequestError:
    """Log an error of the disk and return the 503 for it."""
    log.warning("directory of files failed", error=repr(error))
    return unavailable("file_storage_failed", "files cannot be stored or read now; try again", "file")


def _damaged(record: FileRecord) -> RequestError:
    log.error("file is damaged", file_id=record.file_id)
    return unavailable("file_storage_failed", "the file's bytes cannot be read", "file_id")


def _lock(fd: int, until: float) -> None:
    """Lock the directory within a limit: a gateway stopped with the lock must not stop the others.

    Raises:
        TimeoutError: monotonic time is past `until`.
    """
    turn = threading.Event()  # never set: this thread's time between two tries
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise TimeoutError("the lock of the directory of files is held by another gateway") from None
            turn.wait(LOCK_RETRY_S)
        else:
            return


def _write_record(path: Path, record: FileRecord) -> None:
    fd = os.open(path, CREATE, PRIVATE)
    try:
        left = memoryview(record.model_dump_json().encode())
        while left:
            left = left[os.write(fd, left) :]
        os.utime(fd, (record.expires_at, record.expires_at))
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_record(path: Path) -> FileRecord | None:
    """Read a record; None if it is missing or damaged. Raises OSError: the disk."""
    try:
        fd = os.open(path, EXISTING)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        record = FileRecord.model_validate_json(read_all(fd, MAX_RECORD_BYTES))
    except ValidationError as error:
        _log_unread(path, error)
        return None
    finally:
        os.close(fd)
    return record if record.file_id == path.stem else None


def _log_unread(path: Path, error: Exception) -> None:
    log.warning("record of a file cannot be read", file=path.name, error=type(error).__name__)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
