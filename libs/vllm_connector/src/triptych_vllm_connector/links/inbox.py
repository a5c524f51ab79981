"""What other threads leave for EngineCore's: the store session's and the bus's. No locks, no lost wake-up."""

from collections import deque
from collections.abc import Callable, Iterator

from triptych_common.domain.errors import StoreError
from triptych_common.protocol.messages import EncoderCacheMetadata
from triptych_common.protocol.store import EntrySealed, StoreReply, WriterLost


class StoreLost:
    """The store session ended; every pin that no worker holds is gone."""


class BusChanged:
    """Another Redis answers than before: what was said may be lost."""


class PinReply:
    """The store's answer to one `pin_or_watch`."""

    def __init__(self, mm_hash: str, reply: StoreReply | StoreError) -> None:
        self.mm_hash = mm_hash
        self.reply = reply


Heard = PinReply | EntrySealed | WriterLost | EncoderCacheMetadata | StoreLost | BusChanged


class Inbox:
    """Any thread puts in, the engine's takes out."""

    def __init__(self) -> None:
        self._heard: deque[Heard] = deque()
        self._wake_engine: Callable[[], None] = lambda: None

    def attach_waker(self, wake_engine: Callable[[], None]) -> None:
        """`wake_engine` ends the engine's wait for input; called from other threads."""
        self._wake_engine = wake_engine

    def post(self, heard: Heard) -> None:
        """Leave a message for the engine's thread, and wake it."""
        self._heard.append(heard)
        self.wake()

    def wake(self) -> None:
        """End the engine's wait for input: something is to be done."""
        self._wake_engine()

    def take_all(self) -> Iterator[Heard]:
        """Until it is empty, also of what comes meanwhile."""
        while self._heard:
            yield self._heard.popleft()
