"""Reads the file of API keys again when it has changed: written, replaced, or a link to it leads elsewhere.

The latter is how Kubernetes exchanges secrets. A file that cannot be used leaves the former keys in force.
"""

import asyncio
from concurrent.futures import Executor
from pathlib import Path

from triptych_common.domain.errors import TriptychError
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.access.api_keys_file import ApiKeyEntry, ApiKeysFileError, read_api_keys_file
from triptych_gateway.access.auth import ApiKeys

log = get_logger(__name__)

_Mark = tuple[int, ...] | None  # of one state of the file; None: it is not there


class ApiKeysWatch:
    """One per gateway. `run` must run."""

    def __init__(self, path: Path, api_keys: ApiKeys, interval_s: float, threads: Executor) -> None:
        """`interval_s`: between two looks at the file, each of which asks the disk once for its times."""
        self._path = path
        self._api_keys = api_keys
        self._interval_s = interval_s
        self._threads = threads
        self._seen: _Mark = ()  # of no file: the first look reads it, since it may have changed at the start

    async def run(self) -> None:
        """Never returns."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                entries = await loop.run_in_executor(self._threads, self._read_changed)
                if entries is None:
                    continue
                self._api_keys.replace_entries(entries)
            except TriptychError as error:
                log.warning("file of API keys not usable, the former keys stay in force", error=str(error))
            else:
                log.info("API keys read", num_keys=len(entries))

    def _read_changed(self) -> tuple[ApiKeyEntry, ...] | None:
        """None: it is as it was, usable or not."""
        mark = _mark_of(self._path)
        if mark == self._seen:
            return None
        self._seen = mark  # before it is read: a change meanwhile has another
        try:
            return read_api_keys_file(self._path)
        except ApiKeysFileError as error:
            if isinstance(error.__cause__, OSError):
                self._seen = ()  # it may be readable at the next look
            raise


def _mark_of(path: Path) -> _Mark:
    """Follows links."""
    try:
        info = path.stat()
    except OSError:
        return None
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
