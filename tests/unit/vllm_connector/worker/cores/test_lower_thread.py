"""The priority of a thread of an encoder's team."""

import os
import threading

import pytest

from triptych_vllm_connector.worker.cores import core_share
from triptych_vllm_connector.worker.cores.core_share import COMPUTE_NICE, LOWEST_PRIORITY, lower_thread


@pytest.mark.parametrize("stays_inside", [True, False])
def test_a_thread_comes_after_the_encoders_others_and_never_after_other_programs(
    stays_inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_share, "nice_stays_inside", lambda: stays_inside)
    found: list[tuple[int, bool]] = []

    def lower() -> None:
        # SVT-AV1, with which other tests make videos, gives root's threads SCHED_FIFO.
        before, policy = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
        lower_thread(0)
        found.append((os.getpriority(os.PRIO_PROCESS, 0) - before, os.sched_getscheduler(0) == policy))

    thread = threading.Thread(target=lower)
    thread.start()
    thread.join()
    most = LOWEST_PRIORITY - os.getpriority(os.PRIO_PROCESS, 0)
    assert found == [(min(COMPUTE_NICE, most) if stays_inside else 0, True)]
