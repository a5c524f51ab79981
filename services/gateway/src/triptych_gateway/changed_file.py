"""File that is read again when it was written or replaced, or a link to it leads elsewhere.

Kubernetes exchanges secrets and config maps by such links.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Generic, TypeVar

from triptych_common.domain.errors import TriptychError

Content = TypeVar("Content")
_Mark = tuple[int, ...] | None  # of one state of the file; None: it is not there


class ChangedFile(Generic[Content]):
    """Reader of one file; blocks on the disk, so it runs in a thread."""

    def __init__(self, path: Path, read: Callable[[Path], Content]) -> None:
        """Store the reader, whose error has an OSError as cause if the file may be readable later."""
        self.path = path
        self._read = read
        self._seen: _Mark = ()  # of no file: the first look reads it, since it may have changed at the start

    def try_read(self) -> Content | None:
        """Return the new content, or None without a change. Raises what `read` raises."""
        mark = _mark_of(self.path)
        if mark == self._seen:
            return None
        self._seen = mark  # before it is read: a change meanwhile has another
        try:
            return self._read(self.path)
        except Exception as error:
            if isinstance(error.__cause__, OSError):
                self._seen = ()  # it may be readable at the next look
            raise

    async def watch(
        self,
        interval_s: float,
        threads: Executor,
        apply: Callable[[Content], None],
        on_unusable: Callable[[TriptychError], None],
    ) -> None:
        """Check the file's times at intervals, for ever, and `apply` new content."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(interval_s)
            try:
                content = await loop.run_in_executor(threads, self.try_read)
                if content is not None:
                    apply(content)
            except TriptychError as error:
                on_unusable(error)


def _mark_of(path: Path) -> _Mark:
    """Return the mark of the file behind links, or None."""
    try:
        info = path.stat()
    except OSError:
        return None
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
