"""Media intake: each item of a request becomes checked bytes with their identity (mm_hash).

Items that are named by URL are fetched at the same time. Whatever way bytes came, they are checked alike, and
equal bytes are one item. Decoding base64, reading the image's header and hashing take milliseconds for large
media, so they run in a small pool of threads. Pixels are never decoded here: that is the encoder's work.
An uploaded file was checked at its upload, and an item that a `uuid` names when it was sent: their bytes are
not read here.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_common.domain.hashing import media_digest, mm_hash
from triptych_common.domain.transient import is_transient
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import ImageProperties, Modality
from triptych_common.runtime.service import first_failure
from triptych_gateway.errors import unavailable
from triptych_gateway.fetch.fetcher import SCHEMES, AcceptedUrl, MediaFetcher
from triptych_gateway.fetch.shared_downloads import OnGrowth
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.content_parts import KnownFile, MediaPart
from triptych_gateway.request.data_url import check_data_url, too_large
from triptych_gateway.request.image_header import ImageHeader
from triptych_gateway.request.item_checks import MediaLimits, bytes_of, check_media
from triptych_gateway.request.named_items import MediaFacts, NamedItems

MAX_SCHEME_CHARS = 8  # of those that are fetched, and more


@dataclass(frozen=True, slots=True)
class TakenItem:
    """One media item, checked and named. `content` is shared by items of equal bytes."""

    part: MediaPart
    mm_hash: MmHash
    content: bytes | KnownFile = field(repr=False)
    image: ImageHeader | None  # of an image
    processor_options: Mapping[str, Any]
    media_io_options: Mapping[str, Any]  # this item's modality only, not keyed by it
    piece_rows: int = 0  # as in its `EncodeJob`
    media_digest: str = ""  # of its bytes

    @property
    def needs_encoder(self) -> bool:
        """True if instances with a tower cannot take it: they take no options of a request."""
        return bool(self.processor_options or self.media_io_options)

    @property
    def num_bytes(self) -> int:
        return self.content.num_bytes if isinstance(self.content, KnownFile) else len(self.content)

    @property
    def num_held_bytes(self) -> int:
        return 0 if isinstance(self.content, KnownFile) else len(self.content)

    @property
    def image_properties(self) -> ImageProperties | None:
        return None if self.image is None else self.image.properties

    @property
    def facts(self) -> MediaFacts:
        """Facts about the bytes, for a record without them."""
        return MediaFacts(
            media_digest=self.media_digest, num_bytes=self.num_bytes, image=self.image_properties
        )

    def read_content(self) -> bytes:
        """Return the media's bytes; a file's blocks and raises as `KnownFile.read` does."""
        return self.content.read() if isinstance(self.content, KnownFile) else self.content


@dataclass(frozen=True, slots=True)
class ItemNaming:
    """Parts of an item's identity besides its part and its bytes."""

    namespace_digest: str
    video_piece_rows: int  # the fewest of a video's piece; 0: no video is divided
    tenant_salt: str = ""
    processor_options: Mapping[str, Any] = field(default_factory=dict)
    media_io_options: Mapping[str, Any] = field(default_factory=dict)  # of the item's modality

    def name_item(
        self, part: MediaPart, content: bytes | KnownFile, digest: str, image: ImageHeader | None
    ) -> TakenItem:
        """Return the item of `content`, whose `media_digest` is `digest`.

        Raises:
            RequestError: 400, the options are no plain JSON.
        """
        piece_rows = self.video_piece_rows if part.modality is Modality.VIDEO else 0
        try:
            identity = mm_hash(
                modality=part.modality,
                media_digest=digest,
                namespace_digest=self.namespace_digest,
                processor_options=self.processor_options,
                media_io_options=self.media_io_options,
                tenant_salt=self.tenant_salt,
                piece_rows=piece_rows,
            )
        except TypeError as error:
            message = "mm_processor_kwargs and media_io_kwargs must be plain JSON"
            raise RequestError(400, "invalid_value", message, "mm_processor_kwargs") from error
        return TakenItem(
            part, identity, content, image, self.processor_options, self.media_io_options, piece_rows, digest
        )

    def name_file(self, part: MediaPart, file: KnownFile) -> TakenItem:
        """Return the item of an uploaded file without reading it. Raises as `name_item` does."""
        return self.name_item(part, file, file.media_digest, file.image)


@dataclass(frozen=True, slots=True)
class MediaIntake:
    limits: MediaLimits
    threads: Executor
    fetcher: MediaFetcher
    named: NamedItems
    metrics: GatewayMetrics

    async def take_items(
        self, request: ChatRequest, owner: str, namespace_digest: str, deadline: float, on_growth: OnGrowth
    ) -> tuple[TakenItem, ...]:
        """Take every item of `request`, in order. No text is held beside its bytes for long.

        Nothing is fetched for a request with a forbidden URL.

        Args:
            owner: as in `NamedItems.exchange`.
            deadline: monotonic seconds; items not fetched by then are refused.
            on_growth: called with a number of fetched bytes before they are held; may raise.

        Raises:
            RequestError: 400 or 413 naming an item that is refused; 503 for want of memory, files or places,
                or of Redis for items that are named.
        """
        urls = {part.item_index: url for part in request.media if (url := self._accept(part)) is not None}
        if not urls:
            return await self._take_all(request, owner, namespace_digest, {})
        sizes = dict.fromkeys(urls, 0)
        fetches: dict[int, asyncio.Task[bytes]] = {}

        def grow(item_index: int, num_bytes: int) -> None:
            sizes[item_index] = num_bytes
            on_growth(sum(sizes.values()))

        try:
            async with asyncio.TaskGroup() as group:
                fetches = {
                    part.item_index: group.create_task(
                        self.fetcher.fetch(
                            urls[part.item_index],
                            part.path,
                            request.tenant_salt,
                            deadline,
                            partial(grow, part.item_index),
                            part.modality,
                        )
                    )
                    for part in request.media
                    if part.item_index in urls
                }
                return await self._take_all(request, owner, namespace_digest, fetches)
        except BaseExceptionGroup as errors:
            failure = first_failure(errors)
            errors.__traceback__ = None  # of the group's frame, which holds the group
        try:
            raise failure
        finally:
            del failure, fetches  # its traceback holds this frame, and the request's media with it

    def rename_items(
        self, request: ChatRequest, items: Sequence[TakenItem], namespace_digest: str
    ) -> tuple[TakenItem, ...]:
        """Return `items` of `request` with their names in another namespace."""
        return tuple(
            self._naming(item.part, request, namespace_digest).name_item(
                item.part, item.content, item.media_digest, item.image
            )
            for item in items
        )

    def _accept(self, part: MediaPart) -> AcceptedUrl | None:
        """Return the URL to fetch; None for an item in the request, or a file."""
        if part.file is not None:
            if part.file.num_bytes > self.limits.max_item_bytes:  # another gateway took it
                raise too_large(part.path, self.limits.max_item_bytes)
            return None
        if part.is_base64 or part.is_name:
            return None
        scheme = part.url[:MAX_SCHEME_CHARS].partition(":")[0].lower()
        if scheme in SCHEMES:
            return self.fetcher.accept(part.url, part.path, part.modality)
        check_data_url(part.url, part.path, part.modality)
        return None

    async def _take_all(
        self,
        request: ChatRequest,
        owner: str,
        namespace_digest: str,
        fetches: Mapping[int, asyncio.Task[bytes]],
    ) -> tuple[TakenItem, ...]:
        """Take the items one after the other, each as soon as it has arrived; those named by `uuid` last."""
        loop = asyncio.get_running_loop()
        taken: dict[int, TakenItem] = {}
        contents: dict[MmHash, bytes | KnownFile] = {}

        def add(item: TakenItem) -> None:
            part = item.part
            if not isinstance(contents.get(item.mm_hash), bytes):  # a file may be deleted, bytes are here
                contents[item.mm_hash] = item.content
            taken[part.item_index] = replace(item, content=contents[item.mm_hash])
            if part.place:
                self.metrics.item_bytes.labels(part.modality.value).observe(item.num_bytes)
            request.drop_text(part)

        for part in request.media:
            if part.is_name:
                continue
            if part.file is not None:
                add(self._naming(part, request, namespace_digest).name_file(part, part.file))
                continue
            fetch = fetches.get(part.item_index)
            fetched = None if fetch is None else await fetch
            with self.metrics.check_s.labels(part.modality.value).time():
                item = await loop.run_in_executor(
                    self.threads, self._take, part, fetched, request, namespace_digest
                )
            add(item)
        if any(part.uuid is not None for part in request.media):
            sent = {index: item.facts for index, item in taken.items()}
            await self.named.exchange(owner, request.media, sent)
        for part in request.media:
            if part.is_name and part.file is not None:
                add(self._naming(part, request, namespace_digest).name_file(part, part.file))
        items = [taken[part.item_index] for part in request.media]
        return tuple(replace(item, content=contents[item.mm_hash]) for item in items)

    def _take(
        self, part: MediaPart, fetched: bytes | None, request: ChatRequest, namespace_digest: str
    ) -> TakenItem:
        """Check and name one item; `fetched` None: its bytes are in the request."""
        try:
            content = bytes_of(part, self.limits.max_item_bytes) if fetched is None else fetched
            image = check_media(part, content, self.limits)
            digest = (part.content_digest if fetched is None else "") or media_digest(content)
            return self._naming(part, request, namespace_digest).name_item(part, content, digest, image)
        except Exception as error:
            if is_transient(error):
                message = f"{part.path} cannot be read just now"
                raise unavailable("no_resources", message, part.path) from error
            raise

    def _naming(self, part: MediaPart, request: ChatRequest, namespace_digest: str) -> ItemNaming:
        return ItemNaming(
            namespace_digest,
            self.limits.video_piece_rows,
            request.tenant_salt,
            request.processor_options,
            request.media_io_options.get(part.modality, {}),
        )
