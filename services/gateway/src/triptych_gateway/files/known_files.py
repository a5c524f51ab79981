"""Files that a request names: found among those of its API key, and of the wanted kind."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

from triptych_common.domain.errors import RequestError
from triptych_gateway.files.file_record import FileRecord
from triptych_gateway.files.file_store import FileStore, file_not_found, storage_failed
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.known_file import KnownFile


class KnownFiles:
    """Finder of one gateway's files for requests."""

    def __init__(self, store: FileStore, threads: Executor) -> None:
        self._store = store
        self._threads = threads

    async def find_files(self, parts: Sequence[MediaPart], owner: str) -> None:
        """Complete the parts that name files, from records alone, in one step of a thread.

        Raises:
            RequestError: 404 there is none, it has expired, or it is another key's; 400 of another kind;
                503 the disk.
        """
        named = {part.file_id for part in parts if part.file_id is not None}
        store = self._store
        try:
            records = await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: {file_id: store.find_file(owner, file_id) for file_id in named}
            )
        except OSError as error:
            raise storage_failed(error) from error
        for part in parts:
            if part.file_id is None:
                continue
            record = records[part.file_id]
            if record is None:
                raise file_not_found(part.file_id, part.path)
            if part.takes_any:
                part.modality = record.modalities[0]
            elif part.modality not in record.modalities:
                message = f"{part.path}: the file is not {part.modality} but {record.modalities[0]}"
                raise RequestError(400, "invalid_file", message, part.path)
            part.file = known_file(store, owner, record, self._threads)


def known_file(store: FileStore, owner: str, record: FileRecord, threads: Executor) -> KnownFile:
    """Return the file for a request, with a reader of its bytes."""
    return KnownFile(
        record.file_id,
        record.num_bytes,
        record.media_digest,
        record.modalities,
        record.image_header,
        partial(store.read_content, owner, record),
        threads,
    )
