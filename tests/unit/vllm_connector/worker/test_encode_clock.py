"""The span of an encode: what the GPU took, not what the host took to launch it."""

import time

import pytest

from triptych_vllm_connector.worker.writing import DeviceClock, HostClock, clock_of

MS = 1_000_000


class FakeEvent:
    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms
        self.is_reached = False

    def query(self) -> bool:
        return self.is_reached

    def elapsed_time(self, end_event: "FakeEvent") -> float:
        return end_event.at_ms - self.at_ms


@pytest.fixture
def now_ms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [1000]
    monkeypatch.setattr(time, "time_ns", lambda: now[0] * MS)
    return now


@pytest.fixture
def events() -> list[FakeEvent]:
    return []


@pytest.fixture
def clock(events: list[FakeEvent]) -> DeviceClock:
    def record() -> FakeEvent:
        events.append(FakeEvent(at_ms=250.0 * len(events)))
        return events[-1]

    return DeviceClock(record)


def test_on_a_gpu_the_kernels_count_and_not_their_launches(
    clock: DeviceClock, events: list[FakeEvent], now_ms: list[int]
) -> None:
    clock.start()
    now_ms[0] = 1002  # the host has launched everything
    clock.mark_end()
    clock.mark_end()
    assert len(events) == 2, "the first write of a step"
    events[1].is_reached = True
    assert clock.span_ns() == (1000 * MS, 1250 * MS)


def test_work_that_the_gpu_has_not_begun_is_dated_by_its_launches(
    clock: DeviceClock, now_ms: list[int]
) -> None:
    clock.start()
    now_ms[0] = 1002
    clock.mark_end()
    assert clock.span_ns() == (1000 * MS, 1002 * MS)


def test_each_step_has_events_of_its_own(
    clock: DeviceClock, events: list[FakeEvent], now_ms: list[int]
) -> None:
    for number in range(2):
        clock.start()
        clock.mark_end()
        events[-1].is_reached = True
        assert clock.span_ns() == (1000 * MS, 1250 * MS), number
    assert len(events) == 4


def test_on_the_cpu_the_host_encodes(now_ms: list[int]) -> None:
    clock = clock_of("cpu")
    assert isinstance(clock, HostClock)
    clock.mark_end()
    assert clock.span_ns() == (1000 * MS, 1000 * MS), "no call noted when it began"
    clock.start()
    now_ms[0] = 1300
    clock.mark_end()
    now_ms[0] = 1400
    clock.mark_end()
    assert clock.span_ns() == (1000 * MS, 1300 * MS)
    assert isinstance(clock_of("cuda"), DeviceClock)
