"""Use of the directory, and removal of partial files that a dead gateway left.

Records have the time of their expiry as their time of modification: so one scan of the directory finds those
that are due, without opening any. The record itself has the last word.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from triptych_common.telemetry.logs import get_logger
from triptych_gateway.files.partial_file import is_abandoned, reserved_bytes

log = get_logger(__name__)

RECORD_SUFFIX = ".json"
CONTENT_SUFFIX = ".bin"
TEMPORARY_SUFFIX = ".tmp"  # of a record
OWNER_CHARS = 32


@dataclass(slots=True)
class Use:
    num_files: int = 0
    num_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        self.num_files += 1
        self.num_bytes += num_bytes


@dataclass(slots=True)
class DirectoryUse:
    total: Use = field(default_factory=Use)
    by_owner: dict[str, Use] = field(default_factory=dict)

    def of(self, owner: str) -> Use:
        return self.by_owner.setdefault(owner, Use())

    def add(self, owner: str, num_bytes: int) -> None:
        self.total.add(num_bytes)
        self.of(owner).add(num_bytes)


def folders_of(root: Path) -> Iterator[Path]:
    with os.scandir(root) as entries:
        for entry in entries:
            if len(entry.name) == OWNER_CHARS and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def measure(root: Path) -> DirectoryUse:
    """Measure files, and room reserved for uploads. The caller holds the directory's lock, so incomplete
    files were left by a dead gateway.
    """
    use = DirectoryUse()
    for folder in folders_of(root):
        sizes = _sizes(folder)
        for name, num_bytes in sizes.items():
            reserved = reserved_bytes(name)
            stem, _, suffix = name.rpartition(".")
            if reserved is not None:
                if is_abandoned(folder / name):
                    _remove(folder / name)
                else:
                    use.add(folder.name, reserved)
            elif f".{suffix}" == TEMPORARY_SUFFIX:
                _remove(folder / name)
            elif f".{suffix}" == CONTENT_SUFFIX:
                if stem + RECORD_SUFFIX in sizes:
                    use.add(folder.name, num_bytes)
                else:
                    _remove(folder / name)
            elif f".{suffix}" == RECORD_SUFFIX and stem + CONTENT_SUFFIX not in sizes:
                _remove(folder / name)
    return use


def expiries(root: Path) -> Iterator[tuple[Path, float]]:
    """Yield every record with its expiry, in Unix seconds."""
    for folder in folders_of(root):
        try:
            with os.scandir(folder) as entries:
                found = [
                    (Path(entry.path), entry.stat(follow_symlinks=False).st_mtime)
                    for entry in entries
                    if entry.name.endswith(RECORD_SUFFIX)
                ]
        except FileNotFoundError:  # one was deleted meanwhile; the next look finds the others
            continue
        yield from found


def _sizes(folder: Path) -> dict[str, int]:
    sizes = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:  # deleted meanwhile
                continue
    return sizes


def _remove(path: Path) -> None:
    log.info("unfinished file removed", path=path.name)
    path.unlink(missing_ok=True)
