"""Queue of preprocessed items waiting for the engine; `gate_policy` decides which goes next.

Preprocessing, reservation and metadata run ahead of it. The wake-ups are the ends of encodes, new items, and
a timer shortly before an encode is predicted to end.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from triptych_common.protocol.messages import FailureKind, RequesterKey
from triptych_encoder.encoding import JobFailure
from triptych_encoder.jobs.gate_policy import GateItem, GatePolicy
from triptych_encoder.metrics import EncoderMetrics


class EncodeGate:
    """Encode gate of one engine, used in one event loop."""

    def __init__(
        self, policy: GatePolicy, metrics: EncoderMetrics, row_s: Callable[[], float | None] = lambda: None
    ) -> None:
        """`row_s` returns vLLM's seconds for a row of an item, or None if unknown."""
        self._policy = policy
        self._metrics = metrics
        self._row_s = row_s
        self._timer: asyncio.TimerHandle | None = None
        self._turns: dict[GateItem, asyncio.Future[None]] = {}
        self._answered_at = float("-inf")
        self._unshared_s = 0.0  # worked on the batch, and not yet counted as the work on one of its items

    @contextmanager
    def in_hand(self, item: GateItem) -> Iterator[None]:
        """Register the item with the policy during the block, also before it is prepared."""
        self._policy.add_item(item)
        try:
            yield
        finally:
            self._leave(item)

    def is_next(self, item: GateItem) -> bool:
        """True if no other item in hand goes into vLLM before this one."""
        return self._policy.is_next(item)

    def set_places(self, item: GateItem, places: Iterable[RequesterKey]) -> None:
        self._policy.set_places(item, places)

    @asynccontextmanager
    async def turn(self, item: GateItem, num_rows: int) -> AsyncIterator[None]:
        """Wait for the item's turn; the block is vLLM's work on the item, which is prepared and in hand.

        Raises:
            JobFailure: its deadline passed before its turn came.
        """
        turn = self._turns[item] = asyncio.get_running_loop().create_future()
        item.num_rows, item.seconds = num_rows, num_rows * (self._row_s() or 0.0)
        self._policy.set_ready(item)
        self._open()
        try:
            if not turn.done():
                await asyncio.wait({turn}, timeout=max(item.deadline - time.monotonic(), 0))
            if not turn.done():
                raise JobFailure(FailureKind.EXPIRED, "the deadline passed before the item was encoded")
            yield
        finally:
            del self._turns[item]
            self._leave(item)

    def on_answer(self, item: GateItem, began_at: float) -> float:
        """Record that vLLM has finished `item`, which it was given at `began_at`.

        Returns the seconds that vLLM worked on it, without those in which the item waited for others. Items
        that are computed together share their time by their rows: they are answered at once, so the time
        between two answers says nothing.
        """
        now = time.monotonic()
        self._unshared_s += now - max(began_at, self._answered_at)
        self._answered_at = now
        num_rows = sum(each.num_rows for each in self._policy.batch_of(item))
        worked_s = self._unshared_s * item.num_rows / num_rows if num_rows else self._unshared_s
        self._unshared_s -= worked_s
        return worked_s

    def _leave(self, item: GateItem) -> None:
        self._policy.remove_item(item)
        if not self._policy.num_in_engine:
            self._unshared_s = 0.0  # of items that failed
        self._open()

    def _open(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while batch := self._policy.take_batch(time.monotonic()):
            self._metrics.batch_items.observe(len(batch))
            for item in batch:
                self._turns[item].set_result(None)
        if self._policy.held_until is not None:
            wait_s = self._policy.held_until - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._open)
