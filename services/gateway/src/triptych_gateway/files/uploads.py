"""Upload: received into a partial file, checked, and kept. Nothing of it stays when it fails.

    room held -> received -> checked -> kept
        `-----------`----------`--> discarded, also when the client goes away

The body is parsed, written and hashed in threads as it comes; a few chunks of it are in memory at a time.
Only the check has the whole file, for milliseconds, and books it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial as partial_call
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from triptych_common.domain.containers import AUDIO_CONTAINERS, HEAD_BYTES, VIDEO_CONTAINERS, container_of
from triptych_common.domain.errors import RequestError
from triptych_common.domain.transient import is_transient
from triptych_common.protocol.messages import Modality
from triptych_gateway.access.request_limiter import RequestLimiter
from triptych_gateway.errors import unavailable
from triptych_gateway.files.file_record import FileRecord
from triptych_gateway.files.file_store import FileStore, NewFile, storage_failed
from triptych_gateway.files.partial_file import PartialFile, file_too_large
from triptych_gateway.files.upload_form import MAX_FORM_BYTES, UploadForm, lifetime_of, purpose_of
from triptych_gateway.race import Guard
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.image_header import ImageHeader
from triptych_gateway.request.item_checks import MediaLimits, check_media
from triptych_gateway.request.request_body import body_timeout, header_of

SOUND_BRANDS = (b"M4A ", b"M4B ")  # of an MP4 that holds no pictures
GATHERED_BYTES = 256 << 10  # of a body, before a thread takes them
T = TypeVar("T")


def check_content(content: bytes, limits: MediaLimits) -> tuple[tuple[Modality, ...], ImageHeader | None]:
    """Return the modalities that the file can have, the likeliest first, and an image's header. Takes
    milliseconds.

    Raises:
        RequestError: 400 or 413, it is no image, video or audio that is served.
    """
    kinds = modalities_of(content[:HEAD_BYTES])
    header = check_media(MediaPart(0, (), kinds[0], "", "file"), content, limits)
    return kinds, header


def modalities_of(head: bytes) -> tuple[Modality, ...]:
    """Return modalities by the first bytes: neither video nor audio counts as an image, checked next.

    MP4 and WebM can be video or audio.
    """
    kinds = []
    if container_of(head, VIDEO_CONTAINERS) is not None:
        kinds.append(Modality.VIDEO)
    if container_of(head, AUDIO_CONTAINERS) is not None:
        kinds.append(Modality.AUDIO)
    if head[4:12] in [b"ftyp" + brand for brand in SOUND_BRANDS]:
        kinds.reverse()
    return tuple(kinds) or (Modality.IMAGE,)


class FileUploads:
    def __init__(
        self, store: FileStore, media: MediaLimits, limiter: RequestLimiter, threads: Executor
    ) -> None:
        self._store = store
        self._media = media
        self._limiter = limiter
        self._threads = threads
        self._num_uploads = 0

    async def take_file(self, owner: str, scope: Scope, receive: Receive, guard: Guard) -> FileRecord:
        """Receive the file of the body and keep it for `owner`.

        Args:
            guard: ends the surrounding block when the body takes too long.

        Raises:
            RequestError: it is refused, or there is no room.
            ClientDisconnect: the client went away.
        """
        if self._num_uploads >= self._store.limits.files_max_uploads:
            raise RequestError(429, "too_many_requests", "too many uploads at once; try again shortly")
        self._num_uploads += 1
        try:
            return await self._take(owner, scope, receive, guard)
        except OSError as error:
            raise storage_failed(error) from error
        finally:
            self._num_uploads -= 1

    async def _take(self, owner: str, scope: Scope, receive: Receive, guard: Guard) -> FileRecord:
        limits = self._store.limits
        form = UploadForm.of_content_type(header_of(scope, b"content-type"))
        length = header_of(scope, b"content-length") or ""
        num_announced = int(length) if length.isascii() and length.isdigit() else None
        if num_announced is not None and num_announced > limits.max_file_bytes + MAX_FORM_BYTES:
            raise file_too_large(limits.max_file_bytes)
        partial = await self._run(
            lambda: self._store.begin_file(owner, num_announced), lambda late: late.discard()
        )
        try:
            await self._receive(form, partial, receive, guard)
            new = await self._check(form, partial)
            return await self._run(
                lambda: self._store.keep_file(owner, partial, new),
                lambda late: self._store.delete_file(owner, late.file_id),
            )
        finally:
            await self._run(partial.discard)

    async def _receive(self, form: UploadForm, partial: PartialFile, receive: Receive, guard: Guard) -> None:
        num_body, max_body = 0, self._store.limits.max_file_bytes + MAX_FORM_BYTES
        gathered = bytearray()

        def absorb(data: bytes) -> None:
            for piece in form.feed(data):
                partial.write(piece)

        loop = asyncio.get_running_loop()
        left_s = self._store.limits.files_upload_timeout_s  # of the client's time, not of the disk's
        is_last = False
        while not is_last:
            begun = loop.time()
            limit_s = min(self._store.limits.body_timeout_s, max(left_s, 0.0))
            limit = loop.call_later(limit_s, lambda: guard.fail(body_timeout()))
            try:
                message = await receive()
            finally:
                limit.cancel()
            left_s -= loop.time() - begun
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            gathered += message.get("body", b"")
            is_last = not message.get("more_body")
            if is_last or len(gathered) >= GATHERED_BYTES:
                num_body += len(gathered)
                if num_body > max_body:
                    raise file_too_large(self._store.limits.max_file_bytes)
                data = bytes(gathered)
                gathered.clear()
                await self._run(partial_call(absorb, data))
        form.finish()

    async def _check(self, form: UploadForm, partial: PartialFile) -> NewFile:
        purpose, lifetime_s = purpose_of(form), lifetime_of(form, self._store.limits)
        if not partial.num_bytes:
            raise RequestError(400, "invalid_file", "the file is empty", "file")
        with self._limiter.hold_bytes() as booking:
            booking.resize(partial.num_bytes)
            try:
                modalities, image = await self._run(lambda: check_content(partial.read(), self._media))
            except RequestError:
                raise
            except Exception as error:
                if is_transient(error):
                    raise unavailable("no_resources", "the file cannot be read just now", "file") from error
                raise
        return NewFile(form.filename or "", purpose, lifetime_s, modalities, image)

    async def _run(self, step: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Run `step` in a thread; `undo` gets its result if the caller was cancelled."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, step)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda late: self._on_late(late, undo))
            raise

    def _on_late(self, late: "asyncio.Future[T]", undo: Callable[[T], object] | None) -> None:
        if late.cancelled() or late.exception() is not None or undo is None:
            return
        with suppress(RuntimeError):  # the gateway ends; what is left is removed by the next start
            self._threads.submit(undo, late.result())
