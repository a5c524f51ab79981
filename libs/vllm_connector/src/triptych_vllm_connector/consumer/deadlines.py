"""Until when requests may wait in prefill_decode's engine: a gateway that hangs ends nothing. Pure.

expect (remaining_ms of its params) --time is up--> taken, once
renew (preempted, or it waits again after that): RENEWED_WAIT_S from now
"""

import heapq
from collections.abc import Callable

GRACE_S = 1.0  # a gateway that lives ends the request first, and with a better word
RENEWED_WAIT_S = 30.0  # for a request that had begun


class Deadlines:
    """Times are monotonic seconds. `arm(when)` asks for a call of `take_passed` then, or a little later."""

    def __init__(self) -> None:
        self._by_request: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # with what is out of date; cleaned from the front
        self._armed_for: float | None = None
        self._arm: Callable[[float], None] = lambda when: None

    def __len__(self) -> int:
        return len(self._by_request)

    def bind(self, arm: Callable[[float], None]) -> None:
        self._arm = arm

    def set(self, request_id: str, when: float) -> None:
        """`request_id` may wait until `when`, whatever was said before."""
        self._by_request[request_id] = when
        heapq.heappush(self._heap, (when, request_id))
        if self._armed_for is None or when < self._armed_for:
            self._armed_for = when
            self._arm(when)

    def has(self, request_id: str) -> bool:
        return request_id in self._by_request

    def discard(self, request_id: str) -> None:
        """It has ended."""
        self._by_request.pop(request_id, None)
        self._clean()

    def take_passed(self, now: float) -> list[str]:
        """Requests whose time is up, the longest overdue first. They have no deadline any more."""
        passed: list[str] = []
        self._clean()
        while self._heap and self._heap[0][0] <= now:
            request_id = heapq.heappop(self._heap)[1]
            del self._by_request[request_id]
            passed.append(request_id)
            self._clean()
        if self._armed_for is not None and self._armed_for <= now:
            self._armed_for = self._heap[0][0] if self._heap else None
            if self._armed_for is not None:
                self._arm(self._armed_for)
        return passed

    def _clean(self) -> None:
        while self._heap and self._by_request.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
