"""Media bytes, kept while a request needs them, and served to encoders at a secret path.

For an uploaded file only a reader of its bytes is kept.
"""

import secrets
from dataclasses import dataclass, field

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import MmHash, RequestId
from triptych_gateway.request.content_parts import KnownFile

Content = bytes | KnownFile

MEDIA_PATH = "/internal/media"
_TOKEN_BYTES = 32


class MediaReadError(Exception):
    """The media of a job cannot be read; `error` is for the requests that wait for it."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(eq=False, slots=True)
class MediaSlot:
    """Bytes of one item per request that holds it, since one request's file may be deleted."""

    mm_hash: MmHash
    token: str
    url: str  # for encoders
    contents: dict[RequestId, Content] = field(default_factory=dict, repr=False)

    @property
    def num_bytes(self) -> int:
        return next(
            (each.num_bytes if isinstance(each, KnownFile) else len(each) for each in self.contents.values()),
            0,
        )

    async def fetch(self) -> bytes:
        """Return kept bytes, else those of the first file that can be read.

        Raises:
            RequestError: 404: no request holds the media; 404 or 503: the failure of the last file tried.
        """
        failure, tried = media_gone(), set[str]()
        while True:
            kept = next((each for each in self.contents.values() if isinstance(each, bytes)), None)
            if kept is not None:
                return kept
            files = [each for each in self.contents.values() if isinstance(each, KnownFile)]
            file = next((each for each in files if each.file_id not in tried), None)
            if file is None:
                raise failure
            tried.add(file.file_id)
            try:
                return await file.fetch()
            except RequestError as error:
                failure = error


class MediaCache:
    """One slot per mm_hash; it is emptied when the last request that holds it has ended."""

    def __init__(self, base_url: str = "") -> None:
        self._base_url = base_url
        self._slots: dict[MmHash, MediaSlot] = {}
        self._by_token: dict[str, MediaSlot] = {}

    def keep_media(self, mm_hash: MmHash, content: Content, holder: RequestId) -> str:
        """Keep `content` until `holder` releases it; return its token."""
        slot = self._slots.get(mm_hash)
        if slot is None:
            token = secrets.token_urlsafe(_TOKEN_BYTES)
            slot = MediaSlot(mm_hash, token, f"{self._base_url}{MEDIA_PATH}/{token}")
            self._slots[mm_hash] = slot
            self._by_token[slot.token] = slot
        slot.contents[holder] = content
        return slot.token

    def release_media(self, mm_hash: MmHash, holder: RequestId) -> None:
        """Release `holder`'s media; does nothing for others."""
        slot = self._slots.get(mm_hash)
        if slot is None:
            return
        slot.contents.pop(holder, None)
        if not slot.contents:
            del self._slots[mm_hash]
            del self._by_token[slot.token]

    def media_of(self, mm_hash: MmHash) -> MediaSlot | None:
        """Return the item's media, or None if no request holds it."""
        return self._slots.get(mm_hash)

    def media_by_token(self, token: str) -> MediaSlot | None:
        """Return the media that an encoder requests by token, or None if no request holds them."""
        return self._by_token.get(token)

    def __len__(self) -> int:
        return len(self._slots)


def media_gone() -> RequestError:
    """Return the 404 for an encoder."""
    return RequestError(404, "media_gone", "no running request holds these media")
