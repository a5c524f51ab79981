"""Tail sampling in one process: spans of an unsampled request are kept if it failed or was slow.

Its spans are held until the first of them in this process ends; then all are exported, or none. Other
processes receive `not sampled` from the beginning and record nothing of it.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

MAX_HELD_SPANS = 256  # of one request; the first span is always among those that are kept
NS_PER_MS = 1_000_000

SpanT = TypeVar("SpanT")


@dataclass(frozen=True, slots=True)
class TailSampling:
    """Rules for unsampled requests whose spans are kept all the same."""

    errors: bool = True  # keep requests whose first span failed
    slow_ms: float = 0.0  # keep requests whose first span took this long; 0: none for that

    @property
    def is_on(self) -> bool:
        return self.errors or self.slow_ms > 0

    def reason(self, *, is_error: bool, duration_ns: int) -> str | None:
        """Return why a request is kept, or None."""
        if self.errors and is_error:
            return "error"
        if self.slow_ms and duration_ns >= self.slow_ms * NS_PER_MS:
            return "slow"
        return None


@dataclass(slots=True)
class HeldSpans(Generic[SpanT]):
    """Ended spans of one request, until its first span ends. Those that end later are lost."""

    num_lost: int = 0
    _ended: list[SpanT] = field(default_factory=list)
    _is_open: bool = True

    def add(self, span: SpanT) -> None:
        if self._is_open and len(self._ended) < MAX_HELD_SPANS:
            self._ended.append(span)
        else:
            self.num_lost += 1

    def take(self) -> list[SpanT]:
        """Return all held spans; no more are held."""
        ended, self._ended, self._is_open = self._ended, [], False
        return ended
