"""Files API of one gateway, for its routes and its requests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from triptych_common.domain.errors import RequestError
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.access.callers import Caller
from triptych_gateway.files.encode_ahead import EncodeAhead
from triptych_gateway.files.expiry import ExpirySweep
from triptych_gateway.files.file_listing import ListQuery, page_of
from triptych_gateway.files.file_record import FileRecord, deleted_object
from triptych_gateway.files.file_store import FileStore, file_not_found, storage_failed
from triptych_gateway.files.known_files import KnownFiles, known_file
from triptych_gateway.files.partial_file import OpenContent
from triptych_gateway.files.uploads import FileUploads
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.race import Guard
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.known_file import KnownFile

log = get_logger(__name__)

CHUNK_BYTES = 256 << 10
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileService:
    """Uploaded files of a gateway with a directory. Its tasks (`tasks`) must run."""

    store: FileStore
    uploads: FileUploads
    known: KnownFiles
    expiry: ExpirySweep
    ahead: EncodeAhead | None  # None: switched off
    threads: Executor  # for steps that requests wait for
    disk_threads: Executor  # for scans of many files
    metrics: GatewayMetrics

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Return the background tasks, none of which returns."""
        return [self.expiry.run(self.measure), *([] if self.ahead is None else [self.ahead.run()])]

    async def upload(self, caller: Caller, scope: Scope, receive: Receive, guard: Guard) -> dict[str, Any]:
        """Keep the file of a body and order its encode; `FileUploads.take_file` describes it."""
        outcome = "failed"
        try:
            record = await self.uploads.take_file(caller.owner, scope, receive, guard)
            outcome = "stored"
        except ClientDisconnect:
            outcome = "left"
            raise
        except RequestError as error:
            outcome = "refused" if error.status_code < 500 else "failed"
            raise
        finally:
            self.metrics.file_uploads.labels(outcome).inc()
        log.info("file stored", file_id=record.file_id, num_bytes=record.num_bytes, **caller.fields)
        self.expiry.note_file(record.expires_at)
        if self.ahead is not None:
            self.ahead.add_file(known_file(self.store, caller.owner, record, self.threads), caller.salt)
        await self.measure()
        return record.as_object()

    async def list_files(self, caller: Caller, query: ListQuery) -> dict[str, Any]:
        records = await self._run(lambda: self.store.list_files(caller.owner), self.disk_threads)
        return page_of(records, query)

    async def retrieve(self, caller: Caller, file_id: str) -> FileRecord:
        """Return the record of the caller's file. Raises RequestError: 404."""
        record = await self._run(lambda: self.store.find_file(caller.owner, file_id))
        if record is None:
            raise file_not_found(file_id)
        return record

    async def find_file(self, caller: Caller, file_id: str) -> KnownFile | None:
        """Return a file of the caller, or None.

        Raises:
            RequestError: 503, the disk.
        """
        record = await self._run(lambda: self.store.find_file(caller.owner, file_id))
        return None if record is None else known_file(self.store, caller.owner, record, self.threads)

    async def delete(self, caller: Caller, file_id: str) -> dict[str, Any]:
        """Delete the caller's file. Raises RequestError: 404."""
        if not await self._run(lambda: self.store.delete_file(caller.owner, file_id)):
            raise file_not_found(file_id)
        if self.ahead is not None:
            self.ahead.forget_file(file_id)
        log.info("file deleted", file_id=file_id, **caller.fields)
        await self.measure()
        return deleted_object(file_id)

    @asynccontextmanager
    async def content_of(self, caller: Caller, record: FileRecord) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open the file's bytes, piece by piece, while the block runs.

        Raises:
            RequestError: 404, 503.
        """
        content = await self._run(lambda: OpenContent(self.store.open_content(caller.owner, record)))
        try:
            yield self._pieces(content)
        finally:
            self.threads.submit(content.close)

    async def find_files(self, parts: Sequence[MediaPart], caller: Caller) -> None:
        """Find the files that a request names; `KnownFiles.find_files` describes it."""
        await self.known.find_files(parts, caller.owner)
        if self.ahead is not None:
            for part in parts:
                if part.file_id is not None:
                    self.ahead.forget_file(part.file_id)

    async def measure(self) -> None:
        """Measure the directory for the metrics."""
        try:
            use = await self._run(self.store.use, self.disk_threads)
        except RequestError:
            return  # logged
        self.metrics.files_stored.set(use.num_files)
        self.metrics.files_stored_bytes.set(use.num_bytes)

    async def _pieces(self, content: OpenContent) -> AsyncIterator[bytes]:
        while piece := await self._run(lambda: content.read(CHUNK_BYTES)):
            yield piece

    async def _run(self, step: Callable[[], T], threads: Executor | None = None) -> T:
        """Run a step on the disk in a thread.

        Raises:
            RequestError: 503, the disk.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(threads or self.threads, step)
        except OSError as error:
            raise storage_failed(error) from error


def files_not_enabled(param: str | None = None) -> RequestError:
    """Return the 404 for an operator without a directory of files."""
    return RequestError(404, "files_not_enabled", "this gateway keeps no files", param)
