"""Clock of a step's encoding: the host's, or the GPU's where the host only launches kernels."""

import time
from collections.abc import Callable
from typing import Protocol

import torch


class EncodeClock(Protocol):
    """Measures the encoding of one step at a time."""

    def start(self) -> None:
        """Mark the start of the encoder, for every item of this step."""

    def mark_end(self) -> None:
        """Mark the end: items are encoded, or will be by work now on the stream. The first call counts."""

    def span_ns(self) -> tuple[int, int]:
        """Start and end in Unix nanoseconds; called once the GPU has written the item."""


class HostClock:
    """Clock for CPUs, where calls return when the work is done."""

    def __init__(self) -> None:
        self._start_ns = 0
        self._end_ns = 0

    def start(self) -> None:
        self._start_ns, self._end_ns = time.time_ns(), 0

    def mark_end(self) -> None:
        if self._end_ns == 0:
            self._end_ns = time.time_ns()

    def span_ns(self) -> tuple[int, int]:
        return self._start_ns or self._end_ns, self._end_ns


class TimedEvent(Protocol):
    """A point on a stream; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """True once the stream has reached the event."""
        ...

    def elapsed_time(self, end_event: "TimedEvent") -> float:
        """Milliseconds between two reached events."""
        ...


class DeviceClock:
    """Clock for GPUs: two events around the encoder's kernels, which the host does not wait for.

    If the stream has not reached the second event, because nothing was written, the launches are measured.
    """

    def __init__(self, record: Callable[[], TimedEvent]) -> None:
        """`record` returns an event on the current stream."""
        self._record = record
        self._host = HostClock()
        self._first: TimedEvent | None = None
        self._last: TimedEvent | None = None

    def start(self) -> None:
        self._host.start()
        self._first, self._last = self._record(), None

    def mark_end(self) -> None:
        self._host.mark_end()
        if self._last is None:
            self._last = self._record()

    def span_ns(self) -> tuple[int, int]:
        start_ns, end_ns = self._host.span_ns()
        if self._first is not None and self._last is not None and self._last.query():
            end_ns = start_ns + int(self._first.elapsed_time(self._last) * 1e6)
        return start_ns, end_ns


def clock_of(device_type: str) -> EncodeClock:
    """Clock for a worker on this device type."""
    return HostClock() if device_type == "cpu" else DeviceClock(_record_on_gpu)


def _record_on_gpu() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
