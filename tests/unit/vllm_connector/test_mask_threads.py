"""Masks are made in threads, of which one is left behind with a mask that takes too long."""

import threading
import time

import pytest

from triptych_vllm_connector.grammars import mask_threads
from triptych_vllm_connector.grammars.mask_threads import MaskThreads

LIMIT_S = 60.0


class Mask:
    """A mask that is made once `may_go` is set."""

    def __init__(
        self, longest_s: float = LIMIT_S, *, is_free: bool = True, error: Exception | None = None
    ) -> None:
        self.may_go = threading.Event()
        if is_free:
            self.may_go.set()
        self.calls: list[str] = []
        self.thread: threading.Thread | None = None
        self._longest_s, self._error = longest_s, error

    def make(self) -> None:
        self.calls.append("make")
        self.thread = threading.current_thread()
        assert self.may_go.wait(LIMIT_S)
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        self.calls.append("finish")

    def leave(self) -> None:
        self.calls.append("leave")

    def longest_s(self) -> float:
        return self._longest_s


@pytest.mark.parametrize(("num_masks", "num_threads"), [(0, 1), (1, 1), (5, 1), (5, 2), (3, 8)])
def test_masks_are_made_in_as_many_threads(num_masks: int, num_threads: int) -> None:
    threads, masks = MaskThreads(), [Mask() for _ in range(num_masks)]
    threads.make(masks, num_threads)
    assert [each.calls for each in masks] == [["make", "finish"]] * num_masks
    assert len({each.thread for each in masks}) == min(num_threads, num_masks)
    assert threading.current_thread() not in {each.thread for each in masks}


def test_a_thread_is_used_again() -> None:
    threads, first, second = MaskThreads(), Mask(), Mask()
    threads.make([first])
    threads.make([second])
    assert first.thread is second.thread


def test_the_thread_of_a_mask_that_takes_too_long_is_left_and_ends_with_it() -> None:
    threads, before, late, after = MaskThreads(), Mask(), Mask(0.0, is_free=False), Mask()
    threads.make([before, late, after])
    assert before.calls == after.calls == ["make", "finish"]
    assert late.calls == ["make", "leave"]
    assert late.thread is before.thread
    assert late.thread is not after.thread
    late.may_go.set()
    assert late.thread is not None
    late.thread.join(LIMIT_S)
    assert not late.thread.is_alive()
    assert late.calls == ["make", "leave"]
    again = Mask()
    threads.make([again])
    assert again.thread is after.thread


def test_a_thread_that_waits_for_a_core_is_not_left() -> None:
    class Waiting(Mask):
        def longest_s(self) -> float:
            self.may_go.set()
            return 0.05

    mask = Waiting(is_free=False)
    MaskThreads().make([mask])
    assert mask.calls == ["make", "finish"]


def test_a_mask_that_takes_cpu_time_is_left() -> None:
    class Busy(Mask):
        def make(self) -> None:
            super().make()
            while "leave" not in self.calls:
                time.thread_time()

    busy = Busy(0.02)
    MaskThreads().make([busy])
    assert busy.calls == ["make", "leave"]


def test_a_step_waits_while_as_many_threads_are_left_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_threads, "MAX_LEFT", 1)
    threads, first, second = MaskThreads(), Mask(0.0, is_free=False), Mask(0.0)
    threads.make([first])
    threads.make([second])
    assert (first.calls, second.calls) == (["make", "leave"], ["make", "finish"])
    first.may_go.set()
    assert first.thread is not None
    first.thread.join(LIMIT_S)
    third = Mask(0.0, is_free=False)
    threads.make([third])
    assert third.calls == ["make", "leave"], "the first thread has ended"
    third.may_go.set()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_an_error_reaches_the_caller_and_the_threads_go_on(num_threads: int) -> None:
    threads, masks = MaskThreads(), [Mask(error=RuntimeError("no mask")), Mask()]
    with pytest.raises(RuntimeError, match="no mask"):
        threads.make(masks, num_threads)
    used = {each.thread for each in masks if each.thread is not None}
    assert len(used) == num_threads
    again = [Mask() for _ in range(num_threads)]
    threads.make(again, num_threads)
    assert {each.thread for each in again} == used
