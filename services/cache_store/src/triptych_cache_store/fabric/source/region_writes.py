"""NIXL writes of chunks into the target's region, in the connection's thread.

Several writes are in flight; each notifies the target when it is complete there.
"""

from collections import deque
from collections.abc import Callable

from triptych_cache_store.fabric.wire.channel import PeerSilentError
from triptych_cache_store.fabric.wire.frames import pack_note
from triptych_cache_store.fabric.wire.nixl_memory import NixlMemory, NixlWrite
from triptych_common.domain.errors import MalformedMessageError

WRITES_AT_ONCE = 4
SPIN_S = 0.02  # a write that takes longer is asked for less often
SLOW_PAUSE_S = 0.001
NEVER_S = 3600.0


class RegionWrites:
    """NIXL writes of one connection."""

    def __init__(self, memory: NixlMemory, progress_timeout_s: float) -> None:
        self._memory = memory
        self._progress_timeout_s = progress_timeout_s
        self._writing: deque[tuple[int, NixlWrite]] = deque()  # with the numbers of their offers
        self._gone: dict[int, Callable[[], object]] = {}  # callbacks that wait for the writes of an offer
        self._is_connected = False
        self._moved_at = 0.0

    def connect(self, metadata: bytes) -> None:
        """Connect to the target's region; raises NixlError, or MalformedMessageError the second time."""
        if self._is_connected:
            raise MalformedMessageError("a second region")
        self._memory.connect(metadata)
        self._is_connected = True

    def has_room(self) -> bool:
        return self._is_connected and len(self._writing) < WRITES_AT_ONCE

    def start(self, number: int, view: memoryview, address: int) -> None:
        """Start writing a chunk; raises NixlError."""
        write = self._memory.start_write(view, address, pack_note(number, len(view)))
        self._writing.append((number, write))

    def when_over(self, number: int, on_gone: Callable[[], object]) -> None:
        """Call `on_gone` when nothing of the offer is read any more."""
        if any(each == number for each, _ in self._writing):
            self._gone[number] = on_gone
        else:
            on_gone()

    def step(self, now: float) -> float:
        """Complete finished writes; returns the seconds until the next call.

        Raises:
            PeerSilentError: a write makes no progress.
            NixlError
        """
        while self._writing and self._memory.is_over(self._writing[0][1]):
            number, _ = self._writing.popleft()
            self._moved_at = now
            if number in self._gone and all(each != number for each, _ in self._writing):
                self._gone.pop(number)()
        if not self._writing:
            self._moved_at = now
            return NEVER_S
        if now - self._moved_at > self._progress_timeout_s:
            raise PeerSilentError(f"NIXL wrote nothing for {self._progress_timeout_s:g} s")
        return 0.0 if now - self._moved_at < SPIN_S else SLOW_PAUSE_S

    def close(self) -> None:
        """Close; memory is not read afterwards."""
        self._writing.clear()
        self._memory.close()
