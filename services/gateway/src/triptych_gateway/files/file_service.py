"""FileService: uploaded files for the Files API and for requests that name them."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from triptych_common.domain.errors import RequestError
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.access.auth import Caller
from triptych_gateway.files.encode_ahead import EncodeAhead
from triptych_gateway.files.file_record import FileRecord, ListQuery, deleted_object, page_of
from triptych_gateway.files.file_store import FileStore, file_not_found, storage_failed
from triptych_gateway.files.partial_file import OpenContent
from triptych_gateway.files.uploads import FileUploads
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.race import Guard
from triptych_gateway.request.content_parts import KnownFile, MediaPart

log = get_logger(__name__)

REMOVED_AT_ONCE = 100
LONGEST_WAIT_S = 3600.0  # other gateways' files are removed by them; if such a gateway is gone, by this one
AFTER_FAILURE_S = 60.0
CHUNK_BYTES = 256 << 10
T = TypeVar("T")


class ExpirySweep:
    """Sweep of one gateway's files, asleep until the next one is due. `run` must run."""

    def __init__(self, store: FileStore, threads: Executor) -> None:
        self._store = store
        self._threads = threads
        self._next_at: float | None = None  # wall clock, seconds
        self._changed = asyncio.Event()

    def note_file(self, expires_at: float) -> None:
        """Note the expiry of a new file. A running sweep may have missed it, so another one follows."""
        if self._next_at is None or expires_at < self._next_at:
            self._next_at = expires_at
            self._changed.set()

    async def run(self, measure: Callable[[], Awaitable[None]]) -> None:
        """Remove expired files for ever; `measure` is awaited after each removal."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            self._next_at = None
            wait_s = LONGEST_WAIT_S
            try:
                num_removed, self._next_at = await loop.run_in_executor(
                    self._threads, self._store.remove_expired, REMOVED_AT_ONCE
                )
            except OSError as error:
                log.warning("expired files not removed", error=repr(error))
                wait_s, self._next_at = AFTER_FAILURE_S, None
            else:
                if num_removed:
                    log.info("expired files removed", num_files=num_removed)
                    await measure()
            if self._next_at is not None:
                wait_s = min(wait_s, max(self._next_at - time.time(), 0.0))
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue


@dataclass(frozen=True, slots=True)
class FileService:
    """Uploaded files of a gateway with a directory. Its tasks (`tasks`) must run."""

    store: FileStore
    uploads: FileUploads
    expiry: ExpirySweep
    ahead: EncodeAhead | None  # None: switched off
    threads: Executor  # for steps that requests wait for
    disk_threads: Executor  # for scans of many files
    metrics: GatewayMetrics

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
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
            self.ahead.add_file(self._known(caller.owner, record), caller.salt)
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
        """Return a file of the caller, or None. Raises RequestError: 503, the disk."""
        record = await self._run(lambda: self.store.find_file(caller.owner, file_id))
        return None if record is None else self._known(caller.owner, record)

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
        """Open the file's bytes, piece by piece, while the block runs. Raises RequestError: 404, 503."""
        content = await self._run(lambda: OpenContent(self.store.open_content(caller.owner, record)))
        try:
            yield self._pieces(content)
        finally:
            self.threads.submit(content.close)

    async def find_files(self, parts: Sequence[MediaPart], caller: Caller) -> None:
        """Complete the parts that name files, from records alone, in one step of a thread.

        Raises:
            RequestError: 404 there is none, it has expired, or it is another key's; 400 of another kind;
                503 the disk.
        """
        store, owner = self.store, caller.owner
        named = {part.file_id for part in parts if part.file_id is not None}
        records = await self._run(lambda: {file_id: store.find_file(owner, file_id) for file_id in named})
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
            part.file = self._known(owner, record)
        if self.ahead is not None:
            for file_id in named:
                self.ahead.forget_file(file_id)

    async def measure(self) -> None:
        try:
            use = await self._run(self.store.use, self.disk_threads)
        except RequestError:
            return  # logged
        self.metrics.files_stored.set(use.num_files)
        self.metrics.files_stored_bytes.set(use.num_bytes)

    def _known(self, owner: str, record: FileRecord) -> KnownFile:
        """Return the file for a request, with a reader of its bytes."""
        return KnownFile(
            record.file_id,
            record.num_bytes,
            record.media_digest,
            record.modalities,
            record.image_header,
            partial(self.store.read_content, owner, record),
            self.threads,
        )

    async def _pieces(self, content: OpenContent) -> AsyncIterator[bytes]:
        while piece := await self._run(lambda: content.read(CHUNK_BYTES)):
            yield piece

    async def _run(self, step: Callable[[], T], threads: Executor | None = None) -> T:
        """Run a step on the disk in a thread. Raises RequestError: 503, the disk."""
        try:
            return await asyncio.get_running_loop().run_in_executor(threads or self.threads, step)
        except OSError as error:
            raise storage_failed(error) from error


def files_not_enabled(param: str | None = None) -> RequestError:
    """Return the 404 for an operator without a directory of files."""
    return RequestError(404, "files_not_enabled", "this gateway keeps no files", param)
