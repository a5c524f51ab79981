"""Read the file of models again when it has changed. An unusable file leaves the former in force."""

import asyncio
from concurrent.futures import Executor
from pathlib import Path

from triptych_common.domain.errors import TriptychError
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.changed_file import ChangedFile
from triptych_gateway.routing.models_file import read_models_file
from triptych_gateway.routing.served_models import ServedModels

log = get_logger(__name__)


class ModelsWatch:
    """Watch of the file, one per gateway, from `run` on."""

    def __init__(self, path: Path, models: ServedModels, interval_s: float, threads: Executor) -> None:
        """Store the file and its reader; `interval_s` is the time between two checks of the file's times."""
        self._file = ChangedFile(path, read_models_file)
        self._models = models
        self._interval_s = interval_s
        self._threads = threads

    async def run(self) -> None:
        """Check the file for ever, and replace the content when it has changed."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                content = await loop.run_in_executor(self._threads, self._file.try_read)
            except TriptychError as error:
                log.warning("file of models not usable, the former one stays in force", error=str(error))
                continue
            if content is not None:
                self._models.replace_content(content)
                log.info("models read", num_aliases=len(content.aliases), shares=content.shares)
