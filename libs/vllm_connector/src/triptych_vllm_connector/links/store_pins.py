"""Store pins: commands about pins that EngineCore sends to the cache store, without blocking."""

from collections.abc import Callable
from concurrent.futures import Future

from triptych_common.domain.errors import StoreError
from triptych_common.protocol.store import Evict, PinOrWatch, StoreReply, Unpin, Unwatch
from triptych_common.store_session import StoreSession

OnReply = Callable[[str, StoreReply | StoreError], None]


class StorePins:
    """`PinLink` over a `StoreSession`. `num_ranks` unpins end each pin (one per tensor-parallel rank).

    `on_reply(mm_hash, reply)` is called on the session's thread.
    """

    def __init__(self, session: StoreSession, num_ranks: int, on_reply: OnReply) -> None:
        self._session = session
        self._num_ranks = num_ranks
        self._on_reply = on_reply

    def pin_or_watch(self, mm_hash: str) -> None:
        future = self._session.submit(PinOrWatch(seq=0, mm_hash=mm_hash, num_holders=self._num_ranks))

        def deliver(done: Future[StoreReply]) -> None:
            try:
                self._on_reply(mm_hash, done.result())
            except StoreError as error:
                self._on_reply(mm_hash, error)

        future.add_done_callback(deliver)

    def unpin(self, pin_id: int) -> None:
        for _ in range(self._num_ranks):
            self._session.submit(Unpin(seq=0, pin_id=pin_id))

    def unwatch(self, mm_hash: str) -> None:
        self._session.submit(Unwatch(seq=0, mm_hash=mm_hash))

    def evict_entry(self, mm_hash: str) -> None:
        """Evict the entry unless another client uses it, so that it is made anew."""
        self._session.submit(Evict(seq=0, mm_hash=mm_hash))

    def close(self) -> None:
        self._session.close()
