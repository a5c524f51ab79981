"""Folders of `demo`: private, removed at its end; leftovers of killed demos are swept."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triptych_cli.settings import CliSettings
from triptych_cli.supervisor.supervisor import clear_leftovers, is_supervised
from triptych_cli.system.layout import RunLayout

PREFIX = "triptych-demo-"
LOGS_PREFIX = f"{PREFIX}logs-"
UNLOCKED_AGE_S = 60.0  # a folder this young may be about to be locked by its demo


def base_folder() -> Path:
    """Parent of the demos' run directories, beside that of `up`."""
    return CliSettings().run_dir.parent.resolve()


@contextmanager
def private_layout() -> Iterator[RunLayout]:
    """Folders for one demo, removed at its end.

    Raises:
        OSError: they cannot be made.
    """
    base = base_folder()
    base.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folders = []
        for prefix, place in ((PREFIX, base), (LOGS_PREFIX, Path(tempfile.gettempdir()))):
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            folders.append(folder)
        layout = RunLayout(folders[0], folders[1])
        descriptor = os.open(layout.state_dir, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # `sweep` leaves a locked folder alone
        yield layout


def sweep() -> None:
    """Remove what killed demos of this user have left; other users' folders are not touched."""
    for folder in base_folder().glob(f"{PREFIX}*"):
        layout = RunLayout(folder, folder)
        with contextlib.suppress(FileNotFoundError):  # another sweep, or its demo, was faster
            if _is_ours(folder) and layout.lock_file.exists() and not is_supervised(layout):
                clear_leftovers(layout)
                shutil.rmtree(folder, ignore_errors=True)
    for folder in Path(tempfile.gettempdir()).glob(f"{LOGS_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if _is_ours(folder) and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    info = folder.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()


def _is_abandoned(folder: Path) -> bool:
    """True if no demo holds the folder's lock, or is about to."""
    if time.time() - folder.lstat().st_mtime < UNLOCKED_AGE_S:
        return False
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
