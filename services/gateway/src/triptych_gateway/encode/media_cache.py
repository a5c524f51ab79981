"""Media bytes, kept while a request needs them, and served to encoders at a secret path.

Of an uploaded file nothing is kept but the way to its bytes.
"""

import secrets
from dataclasses import dataclass, field

from triptych_common.protocol.ids import MmHash, RequestId
from triptych_gateway.request.known_file import KnownFile

Content = bytes | KnownFile

MEDIA_PATH = "/internal/media"
_TOKEN_BYTES = 32


@dataclass(slots=True)
class _Slot:
    token: str
    content: Content = field(repr=False)
    holders: set[RequestId] = field(default_factory=set)


class MediaCache:
    """One slot per mm_hash; it is emptied when the last request that holds it has ended."""

    def __init__(self) -> None:
        self._slots: dict[MmHash, _Slot] = {}
        self._by_token: dict[str, _Slot] = {}

    def keep_media(self, mm_hash: MmHash, content: Content, holder: RequestId) -> str:
        """Keep `content` until `holder` (and all others) let go. Returns its token."""
        slot = self._slots.get(mm_hash)
        if slot is None:
            slot = _Slot(secrets.token_urlsafe(_TOKEN_BYTES), content)
            self._slots[mm_hash] = slot
            self._by_token[slot.token] = slot
        elif isinstance(content, bytes):
            slot.content = content  # a file may be deleted, and must not be missed by this holder
        slot.holders.add(holder)
        return slot.token

    def release_media(self, mm_hash: MmHash, holder: RequestId) -> None:
        """`holder` needs it no more. Harmless when it never did."""
        slot = self._slots.get(mm_hash)
        if slot is None:
            return
        slot.holders.discard(holder)
        if not slot.holders:
            del self._slots[mm_hash]
            del self._by_token[slot.token]

    def media_of(self, mm_hash: MmHash) -> tuple[str, Content] | None:
        """(token, content), or None when no request holds it."""
        slot = self._slots.get(mm_hash)
        return None if slot is None else (slot.token, slot.content)

    def media_by_token(self, token: str) -> Content | None:
        """The content that an encoder requests by its token; None when no request holds it."""
        slot = self._by_token.get(token)
        return None if slot is None else slot.content

    def __len__(self) -> int:
        return len(self._slots)
