"""Deadlines of requests that wait in prefill_decode's engine, for gateways that hang. Pure.

start_wait (remaining_ms of its params) --time is up--> taken, once
renew_wait (preempted, or it waits again after that): RENEWED_WAIT_S from now
"""

import heapq
from collections.abc import Callable

GRACE_S = 1.0  # a gateway that lives ends the request first, and with a better error
RENEWED_WAIT_S = 30.0  # for a request that had begun


class Deadlines:
    """Deadlines in monotonic seconds (`now`); `set_alarm(when)` requests a call of `take_passed` then."""

    def __init__(self, now: Callable[[], float], set_alarm: Callable[[float], None]) -> None:
        self._now = now
        self._set_alarm = set_alarm
        self._by_request: dict[str, float] = {}  # engine request id -> until when
        self._heap: list[tuple[float, str]] = []  # with what is out of date; cleaned from the front
        self._alarm_at: float | None = None

    def __len__(self) -> int:
        return len(self._by_request)

    def start_wait(self, engine_request_id: str, remaining_s: float) -> None:
        self._set_deadline(engine_request_id, self._now() + remaining_s + GRACE_S)

    def renew_wait(self, engine_request_id: str) -> None:
        """Give a request that has begun and waits again RENEWED_WAIT_S."""
        self._set_deadline(engine_request_id, self._now() + RENEWED_WAIT_S)

    def has_deadline(self, engine_request_id: str) -> bool:
        return engine_request_id in self._by_request

    def end_wait(self, engine_request_id: str) -> None:
        self._by_request.pop(engine_request_id, None)
        self._clean()

    def take_passed(self) -> list[str]:
        """Requests past their deadline, the most overdue first; their deadlines are removed."""
        now = self._now()
        passed: list[str] = []
        self._clean()
        while self._heap and self._heap[0][0] <= now:
            engine_request_id = heapq.heappop(self._heap)[1]
            del self._by_request[engine_request_id]
            passed.append(engine_request_id)
            self._clean()
        if self._alarm_at is not None and self._alarm_at <= now:
            self._alarm_at = self._heap[0][0] if self._heap else None
            if self._alarm_at is not None:
                self._set_alarm(self._alarm_at)
        return passed

    def _set_deadline(self, engine_request_id: str, when: float) -> None:
        self._by_request[engine_request_id] = when
        heapq.heappush(self._heap, (when, engine_request_id))
        if self._alarm_at is None or when < self._alarm_at:
            self._alarm_at = when
            self._set_alarm(when)

    def _clean(self) -> None:
        while self._heap and self._by_request.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
