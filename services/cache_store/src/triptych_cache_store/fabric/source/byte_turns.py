"""Order and rate of chunks on a connection. Pure, without a clock.

`domain.fair_turns` orders classes, and entries of one class, with bytes as the cost: a more urgent entry
overtakes a long one at the next chunk, and entries of one class get equal shares.
"""

import threading

from triptych_common.domain.fair_turns import FairTurns, Lane
from triptych_common.protocol.messages import EncodeClass

BURST_S = 0.05  # of the rate, that may be sent at once


class ByteTurns:
    """Turns of the entries with bytes to send, by offer number."""

    def __init__(self) -> None:
        self._turns = FairTurns()
        self._lanes: dict[int, Lane] = {}

    def add(self, number: int, encode_class: EncodeClass) -> None:
        """Add an entry, or move it to another class."""
        self._lanes[number] = Lane(encode_class, str(number))

    def remove(self, number: int) -> None:
        self._lanes.pop(number, None)

    def next_number(self) -> int | None:
        """Number of the offer that sends next; None if none has bytes to send."""
        if not self._lanes:
            return None
        lanes = {lane: number for number, lane in self._lanes.items()}
        return lanes[self._turns.next_lane(lanes)]

    def take_turn(self, number: int, num_bytes: int) -> None:
        """Charge the offer with `num_bytes` sent."""
        self._turns.take_turn(self._lanes[number], num_bytes, self._lanes.values())


class RateLimit:
    """Limit in bytes per second over all connections of an agent. Thread-safe."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0  # when what was taken has been paid for
        self._lock = threading.Lock()

    def pause_s(self, now: float) -> float:
        """Seconds to wait before anything may be sent."""
        return 0.0 if self._bytes_per_s is None else max(0.0, self._free_at - now - BURST_S)

    def take(self, num_bytes: int, now: float) -> None:
        """Count `num_bytes` as sent at `now`."""
        if self._bytes_per_s is not None:
            with self._lock:
                self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
