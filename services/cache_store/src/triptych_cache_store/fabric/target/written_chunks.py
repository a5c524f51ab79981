"""Chunks that the source writes into the region over NIXL, tracked in the connection's thread.

Each complete chunk brings a notification. An offer is *open* from its `ACCEPTED` until the source has sent
the number of chunks written, by `END` or `CANCEL`, and all notifications have come: then nothing is written
for it any more, and its blocks may be reused. If the source does not send it, the link ends, and NIXL's agent
with it, before any block is given back.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from triptych_cache_store.fabric.wire.channel import PeerSilentError
from triptych_cache_store.fabric.wire.frames import read_note
from triptych_cache_store.fabric.wire.nixl_memory import NixlMemory
from triptych_common.domain.errors import MalformedMessageError

SPIN_S = 0.02  # notes that take longer are asked for less often
SLOW_PAUSE_S = 0.001
NEVER_S = 3600.0
OnOver = Callable[[bytes | None], None]
"""Called with the checksum from `END`, or None if the offer was cancelled."""


@dataclass
class OpenOffer:
    """An offer whose blocks may be written."""

    num_bytes: int  # of the entry
    on_over: OnOver
    is_begun: bool = False
    num_written: int = 0  # bytes
    num_chunks: int = 0
    total_chunks: int | None = None  # as the source has said
    digest: bytes | None = None
    on_gone: Callable[[], object] | None = None


class WrittenChunks:
    """Open offers of one connection."""

    def __init__(self, memory: NixlMemory, progress_timeout_s: float) -> None:
        self._memory = memory
        self._progress_timeout_s = progress_timeout_s
        self._open: dict[int, OpenOffer] = {}
        self._moved_at = 0.0

    def metadata(self) -> bytes:
        """NIXL metadata that the source needs."""
        return self._memory.metadata()

    def open(self, number: int, offset: int, num_bytes: int, on_over: OnOver) -> int:
        """Open the offer for writes; returns the address for the source."""
        self._open[number] = OpenOffer(num_bytes, on_over)
        return self._memory.address_of(offset)

    def begin(self, number: int) -> None:
        """Record that the source is about to write."""
        if (offer := self._open.get(number)) is not None:
            offer.is_begun = True
            self._moved_at = time.monotonic()

    def end(self, number: int, total_chunks: int, digest: bytes | None) -> None:
        """Record the source's final chunk count; repeated calls have no effect."""
        offer = self._open.get(number)
        if offer is not None and offer.total_chunks is None:
            offer.total_chunks, offer.digest = total_chunks, digest
            self._moved_at = time.monotonic()
            self._close_if_over(number, offer)

    def when_over(self, number: int, on_gone: Callable[[], object]) -> None:
        """Call `on_gone` when nothing is written for the offer any more."""
        if (offer := self._open.get(number)) is not None:
            offer.on_gone = on_gone
        else:
            on_gone()

    def step(self, now: float) -> float:
        """Process notifications; returns the seconds until the next call.

        Raises:
            MalformedMessageError: it was not to come.
            PeerSilentError: what the source has written does not come.
            NixlError
        """
        if not any(offer.is_begun or offer.total_chunks for offer in self._open.values()):
            return NEVER_S
        for note in self._memory.take_notes():
            self._moved_at = now
            number, num_bytes = read_note(note)
            offer = self._open.get(number)
            if offer is None:
                raise MalformedMessageError("a chunk of what is not open")
            offer.num_chunks += 1
            offer.num_written += num_bytes
            if offer.num_written > offer.num_bytes:
                raise MalformedMessageError("more bytes than the entry has")
            self._close_if_over(number, offer)
        silent_s = now - self._moved_at
        if silent_s > self._progress_timeout_s and any(each.total_chunks for each in self._open.values()):
            raise PeerSilentError(f"NIXL brought nothing for {self._progress_timeout_s:g} s")
        return 0.0 if silent_s < SPIN_S else SLOW_PAUSE_S

    def close(self) -> None:
        """Close; memory is not written afterwards."""
        self._open.clear()
        self._memory.close()

    def _close_if_over(self, number: int, offer: OpenOffer) -> None:
        if offer.total_chunks is None or offer.num_chunks < offer.total_chunks:
            return
        if offer.num_chunks > offer.total_chunks:
            raise MalformedMessageError("more chunks than the source has counted")
        if offer.digest is not None and offer.num_written != offer.num_bytes:
            raise MalformedMessageError("fewer bytes than the entry has")
        del self._open[number]
        offer.on_over(offer.digest)
        if offer.on_gone is not None:
            offer.on_gone()
