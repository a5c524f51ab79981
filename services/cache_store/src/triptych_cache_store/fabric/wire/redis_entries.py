"""Entries of a link's Redis streams: payload, read position of the other direction, proof of the writer.
Pure.

    byte   0..7    8      9..        last 32
           taken   kind   payload    HMAC-SHA256

`taken`: bytes of the other stream that the writer has taken out of Redis, ever; its peer may have so many
more there. The proof is over all before it and the number of the entry in its stream, from `protect` on;
before that, which is the handshake, it is zero. So who has Redis, and not the key, can end a link, and no
more.
"""

import hmac
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from triptych_cache_store.fabric.wire.channel import ChannelError

MAX_PAYLOAD_BYTES = 256 << 10
ENTRY_COST_BYTES = 256  # upper bound of an entry's overhead in Redis, counted with its payload
PROOF_BYTES = 32
_HEAD = struct.Struct(">QB")
_NUMBER = struct.Struct(">Q")


class EntryKind(IntEnum):
    BYTES = 0  # none: only `taken` is news
    END = 1  # the last one


class LinkEntry(NamedTuple):
    kind: EntryKind
    num_taken: int
    payload: memoryview


class EntrySeal:
    """Creates or verifies the proofs of one direction's entries, in order."""

    def __init__(self) -> None:
        self._key = b""
        self._number = 0

    def start(self, key: bytes) -> None:
        """Require a proof from the next entry on."""
        self._key = key

    def pack(self, kind: EntryKind, num_taken: int, parts: Sequence[memoryview]) -> bytes:
        head = _HEAD.pack(num_taken, kind)
        return b"".join((head, *parts, self._proof(head, *parts)))

    def unpack(self, data: bytes) -> LinkEntry:
        """Unpack the next entry; raises ChannelError if the peer did not write it."""
        if not 0 <= len(data) - _HEAD.size - PROOF_BYTES <= MAX_PAYLOAD_BYTES:
            raise ChannelError("an entry of the link's stream has a wrong size")
        view = memoryview(data)
        proof = self._proof(view[:-PROOF_BYTES])
        if self._key and not hmac.compare_digest(proof, view[-PROOF_BYTES:]):
            raise ChannelError("an entry of the link's stream is not the peer's next one")
        num_taken, kind = _HEAD.unpack_from(data)
        if kind not in (EntryKind.BYTES, EntryKind.END):
            raise ChannelError(f"no entry of a link is of kind {kind}")
        return LinkEntry(EntryKind(kind), num_taken, view[_HEAD.size : -PROOF_BYTES])

    def _proof(self, *parts: bytes | memoryview) -> bytes:
        if not self._key:
            return bytes(PROOF_BYTES)
        proof = hmac.new(self._key, _NUMBER.pack(self._number), "sha256")
        for part in parts:
            proof.update(part)
        self._number += 1
        return proof.digest()


def cost_of(num_bytes: int) -> int:
    """Bytes that an entry with this payload counts against the window; 0 without a payload."""
    return num_bytes + ENTRY_COST_BYTES if num_bytes else 0
