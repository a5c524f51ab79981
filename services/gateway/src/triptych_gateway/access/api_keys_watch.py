"""Read the file of API keys again when it has changed. An unusable file leaves the former in force."""

import asyncio
from concurrent.futures import Executor
from pathlib import Path

from triptych_common.domain.errors import TriptychError
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.access.api_keys_file import read_api_keys_file
from triptych_gateway.access.auth import ApiKeys
from triptych_gateway.changed_file import ChangedFile

log = get_logger(__name__)


class ApiKeysWatch:
    """Watch of the file, one per gateway, from `run` on."""

    def __init__(self, path: Path, api_keys: ApiKeys, interval_s: float, threads: Executor) -> None:
        """Store the file and its reader; `interval_s` is the time between two checks of the file's times."""
        self._file = ChangedFile(path, read_api_keys_file)
        self._api_keys = api_keys
        self._interval_s = interval_s
        self._threads = threads

    async def run(self) -> None:
        """Check the file for ever, and replace the keys when it has changed."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                entries = await loop.run_in_executor(self._threads, self._file.try_read)
                if entries is None:
                    continue
                self._api_keys.replace_entries(entries)
            except TriptychError as error:
                log.warning("file of API keys not usable, the former keys stay in force", error=str(error))
            else:
                log.info("API keys read", num_keys=len(entries))
